"""One sequence from its arrival to its finish, and how it is sampled: `sampling_params` by SGLang's names, defaults and ranges."""

import time
from dataclasses import dataclass, field
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

    skip_special_tokens and no_stop_trim are about text, which is not answered here.
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
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: dict[int, float] = {}

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


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt being continued. Output fields are filled when it finishes, is retracted, or is watched step by step.

    `limit` is the most tokens it may generate, `stop_ids` end it (and are kept), `weight_changes` lists
    (version until then, tokens generated until then), `version_spans` (version, start, end) once it has finished. `pages` hold its keys
    and values while it runs, the first `num_known` tokens' from before; sequences of one `cache_key` share pages.
    """

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    limit: int
    stop_ids: frozenset[int] = frozenset()
    ignored_stop_ids: frozenset[int] = frozenset()  # with ignore_eos: they do not end it, and come no earlier than min_new_tokens either
    return_logprob: bool = False
    logprob_start: int | None = None
    cache_key: str = ""

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    weight_changes: list[tuple[str, int]] = field(default_factory=list)
    version_spans: list[tuple[str, int, int]] = field(default_factory=list)
    is_special: bool = field(init=False)
    pages: list[int] = field(default_factory=list)
    num_known: int = 0
    placed_after: int = 0  # how many flushes of the cache
    num_cached_tokens: int = 0
    num_retractions: int = 0
    created_s: float = field(default_factory=time.monotonic)
    finished_s: float = 0.0

    def __post_init__(self) -> None:
        """Fix `is_special`, whether the sequence takes any slow path: most take none, and a step then skips looking."""
        sampling = self.sampling
        self.is_special = self.is_watched or sampling.is_adjusted or sampling.is_filtered

    @property
    def is_watched(self) -> bool:
        """Whether its tokens must be looked at after every step, not only at its end."""
        return bool(self.sampling.stop) or self.sampling.is_penalised

    @property
    def tokens(self) -> list[int]:
        """Prompt and saved output."""
        return self.prompt + self.output_ids

    @property
    def is_scored(self) -> bool:
        """Whether logprobs of its prompt are still to be computed."""
        return self.logprob_start is not None and not self.output_ids

    @property
    def max_tokens(self) -> int:
        """Tokens it may come to hold: prompt and output."""
        return len(self.prompt) + self.limit

    def change_weights(self, old_version: str) -> None:
        """Note that the tokens so far were made by `old_version`."""
        if self.output_ids:
            self.weight_changes.append((old_version, len(self.output_ids)))

    def finish(self, reason: dict[str, Any], version: str) -> None:
        """Set the finish reason and fix which version made which tokens; `version` made the last ones."""
        self.finish_reason = reason
        self.finished_s = time.monotonic()
        spans: list[tuple[str, int, int]] = []
        for name, end in [*self.weight_changes, (version, len(self.output_ids))]:
            if spans and end <= spans[-1][2]:
                continue
            if spans and spans[-1][0] == name:
                spans[-1] = (name, spans[-1][1], end)
            else:
                spans.append((name, spans[-1][2] if spans else 0, end))
        self.version_spans = spans


def stopped(matched: int | str) -> dict[str, Any]:
    """Finish reason: a stop token or stop string was generated."""
    return {"type": "stop", "matched": matched}


def out_of_length(length: int) -> dict[str, Any]:
    """Finish reason: `length` tokens were generated."""
    return {"type": "length", "length": length}


def aborted(message: str = "Aborted") -> dict[str, Any]:
    """Finish reason: aborted by request; the output so far is kept."""
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}
