"""The `sampling_params` of a request: SGLang's names, defaults and ranges."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

GREEDY_BELOW = 1e-6  # SGLang's _SAMPLING_EPS: a lower temperature means argmax
MAX_STOP_STRINGS = 32

T = TypeVar("T")


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How one sequence is sampled; `null` means the default, an unknown field is refused.

    temperature     0 or more; below 1e-6 greedy, and the logprobs are then those of temperature 1
    top_k           -1: off; top_p in (0, 1]; min_p in [0, 1]
    max_new_tokens  null: up to the context length
    stop            strings, matched in the decoded text; stop_token_ids are kept in the output
    n               samples of each prompt
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None

    def resolved(self, vocab_size: int) -> Sampling:
        """These values with defaults filled in and ranges checked; ValueError says which value is out of range."""
        greedy = self.temperature is not None and 0 <= self.temperature < GREEDY_BELOW
        sampling = Sampling(
            temperature=1.0 if greedy or self.temperature is None else self.temperature,
            greedy=greedy or self.top_k == 1,
            top_p=_default(self.top_p, 1.0),
            top_k=_default(self.top_k, -1),
            min_p=_default(self.min_p, 0.0),
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=_default(self.min_new_tokens, 0),
            stop=[self.stop] if isinstance(self.stop, str) else list(self.stop or []),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=_default(self.ignore_eos, False),
            n=_default(self.n, 1),
            skip_special_tokens=_default(self.skip_special_tokens, True),
            no_stop_trim=_default(self.no_stop_trim, False),
            repetition_penalty=_default(self.repetition_penalty, 1.0),
            frequency_penalty=_default(self.frequency_penalty, 0.0),
            presence_penalty=_default(self.presence_penalty, 0.0),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            seed=self.sampling_seed,
        )
        _check(sampling, vocab_size)
        return sampling


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters with every default filled in and every range checked."""

    temperature: float
    greedy: bool
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int | None
    min_new_tokens: int
    stop: list[str]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    n: int
    skip_special_tokens: bool
    no_stop_trim: bool
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    seed: int | None

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p can remove a token."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def is_penalised(self) -> bool:
        """Whether logits depend on the tokens generated so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def is_adjusted(self) -> bool:
        """Whether logits are changed row by row before sampling."""
        return self.is_penalised or self.min_new_tokens > 0 or bool(self.logit_bias)


def _default(value: T | None, default: T) -> T:
    return default if value is None else value


def _check(sampling: Sampling, vocab_size: int) -> None:
    limit = sampling.max_new_tokens
    checks = {
        f"temperature must be a non-negative finite number, got {sampling.temperature}": 0 <= sampling.temperature < math.inf,
        f"top_p must be in (0, 1], got {sampling.top_p}": 0 < sampling.top_p <= 1,
        f"top_k must be -1 (disable) or at least 1, got {sampling.top_k}": sampling.top_k == -1 or sampling.top_k >= 1,
        f"min_p must be in [0, 1], got {sampling.min_p}": 0 <= sampling.min_p <= 1,
        f"max_new_tokens must be at least 0, got {limit}": limit is None or limit >= 0,
        f"min_new_tokens must be in [0, max_new_tokens], got {sampling.min_new_tokens}": (
            sampling.min_new_tokens >= 0 and (limit is None or sampling.min_new_tokens <= limit)
        ),
        f"n must be at least 1, got {sampling.n}": sampling.n >= 1,
        f"at most {MAX_STOP_STRINGS} stop strings, got {len(sampling.stop)}": len(sampling.stop) <= MAX_STOP_STRINGS,
        f"repetition_penalty must be in (0, 2], got {sampling.repetition_penalty}": 0 < sampling.repetition_penalty <= 2,
        f"frequency_penalty must be in [-2, 2], got {sampling.frequency_penalty}": -2 <= sampling.frequency_penalty <= 2,
        f"presence_penalty must be in [-2, 2], got {sampling.presence_penalty}": -2 <= sampling.presence_penalty <= 2,
        f"logit_bias must name token ids in [0, {vocab_size})": all(0 <= token < vocab_size for token in sampling.logit_bias),
    }
    for message, holds in checks.items():
        if not holds:
            raise ValueError(message)
