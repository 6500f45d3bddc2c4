"""The `sampling_params` of a request: SGLang's names, defaults and ranges."""

from typing import Annotated, Any

import msgspec

GREEDY_BELOW = 1e-6  # SGLang's _SAMPLING_EPS: a lower temperature means argmax
MAX_STOP_STRINGS = 32
MAX_SHOWN = 200
DEFAULT_NEW_TOKENS = 128

Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How one sequence is sampled.

    temperature     below 1e-6 greedy, and the logprobs are then those of temperature 1
    top_k           -1: off
    max_new_tokens  null: up to the context length; left out: 128, or as many as the context has room for
    stop            strings, matched in the decoded text; stop_token_ids are kept in the output
    n               samples of each prompt
    """

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=0)] | msgspec.UnsetType | None = msgspec.UNSET
    min_new_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    stop: Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n: Annotated[int, msgspec.Meta(ge=1)] = 1
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: dict[int, float] = {}
    sampling_seed: int | None = None

    @classmethod
    def read(cls, given: dict[str, Any], vocab_size: int) -> "SamplingParams":
        """`null` means the default, but for max_new_tokens. Raises ValueError, which names what is unknown or out of range."""
        values = {name: value for name, value in given.items() if value is not None or name == "max_new_tokens"}
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        try:
            params = msgspec.convert(values, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params {str(given)[:MAX_SHOWN]}: {error}") from None
        if outside := [token for token in params.logit_bias if not 0 <= token < vocab_size]:
            raise ValueError(f"logit_bias must name token ids in [0, {vocab_size}), got {outside[0]}")
        return params

    def __post_init__(self) -> None:
        """What concerns more than one field."""
        if not (self.top_k == -1 or self.top_k >= 1 or self.is_greedy):
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {self.top_k}")
        if (limit := self.token_limit) is not None and self.min_new_tokens > limit:
            raise ValueError(f"min_new_tokens must be in [0, max_new_tokens({limit})], got {self.min_new_tokens}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by."""
        return 1.0 if self.temperature < GREEDY_BELOW else self.temperature

    @property
    def token_limit(self) -> int | None:
        """max_new_tokens, or its default; None: no limit but the context's."""
        return DEFAULT_NEW_TOKENS if self.max_new_tokens is msgspec.UNSET else self.max_new_tokens

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p can remove a token."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def is_penalised(self) -> bool:
        """Whether logits depend on the tokens generated so far."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_adjusted(self) -> bool:
        """Whether logits are changed row by row before sampling."""
        return self.is_penalised or self.min_new_tokens > 0 or bool(self.logit_bias)
