"""One sequence from its arrival to its finish."""

import time
from dataclasses import dataclass, field
from typing import Any

from rollout.embedded.sampling_params import SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt being continued. Output fields are filled when it finishes, is retracted, or is watched step by step.

    `limit` is the most tokens it may generate, `stop_ids` end it (and are kept), `weight_changes` lists
    (version until then, tokens generated until then). `pages` hold its keys and values while it runs, the first `num_known` tokens' from
    before; sequences of one `cache_key` share pages.
    """

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    limit: int
    stop_ids: frozenset[int] = frozenset()
    ignored_stop_ids: frozenset[int] = frozenset()  # with ignore_eos: they do not end it, and come no earlier than min_new_tokens either
    return_logprob: bool = False
    logprob_start: int | None = None
    stream: bool = False
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
        self.is_special = self.is_watched or sampling.is_adjusted or sampling.is_filtered or sampling.sampling_seed is not None

    @property
    def is_watched(self) -> bool:
        """Whether its tokens must be looked at after every step, not only at its end."""
        return self.stream or bool(self.sampling.stop) or self.sampling.is_penalised

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
        self.update_spans(version)

    def update_spans(self, version: str) -> None:
        """Recompute `version_spans`, (version, start, end) over output tokens, `version` being the current one."""
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
