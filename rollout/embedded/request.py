"""The body of `/generate`: checked, then expanded to sequences."""

import uuid
from typing import Any

import msgspec

from rollout.embedded.model import EmbeddedModel
from rollout.embedded.sequence import SamplingParams, Sequence


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`/generate` as SGLang takes it; what is not listed here is refused. Requests of one `extra_key` share keys and values."""

    input_ids: list[int | list[int]]
    rid: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    extra_key: str | None = None
    text: str | None = None
    stream: bool = False
    model: str | None = None
    log_metrics: bool = True
    no_logs: bool = False
    background: bool = False
    return_text_in_logprobs: bool = False
    return_hidden_states: bool = False
    return_bytes: bool = False
    return_entropy: bool = False


ONLY_OFF = ("text", "stream", "background", "return_text_in_logprobs", "return_hidden_states", "return_bytes", "return_entropy")
"""A router names them in each request, as off."""


class RequestExpander:
    """Turns a body into sequences of one model; ValueError says what of the body cannot be served."""

    def __init__(self, model: EmbeddedModel, *, has_tokenizer: bool) -> None:
        self._config, self._context_length, self._has_tokenizer = model.config, model.max_tokens, has_tokenizer

    def expand(self, body: GenerateBody) -> tuple[list[Sequence], bool]:
        """One sequence a prompt, and whether the answer is one object; ranges, token ids and lengths checked."""
        if asked := [name for name in ONLY_OFF if getattr(body, name)]:
            raise ValueError(f"unknown field `{asked[0]}`, but for off; for other fields of /generate use SGLang")
        prompts, is_single = self._prompts(body)
        count = len(prompts)
        samplings = [SamplingParams.read(given, self._config.vocab_size) for given in _per_prompt(body.sampling_params, count, {})]
        has_logprobs, start = bool(body.return_logprob), -1 if body.logprob_start_len is None else body.logprob_start_len
        sequences = []
        for rid, prompt, sampling in zip(_rids(body.rid, count), prompts, samplings, strict=True):
            sequence = self._sequence(rid, prompt, sampling)
            sequence.return_logprob, sequence.cache_key = has_logprobs, body.extra_key or ""
            sequence.logprob_start = start if has_logprobs and 0 <= start < len(prompt) else None
            sequences.append(sequence)
        return sequences, is_single

    def _prompts(self, body: GenerateBody) -> tuple[list[list[int]], bool]:
        """The prompts, and whether there is one that is no list of prompts."""
        given: Any = body.input_ids
        if len({type(item) for item in given}) > 1:
            raise ValueError("input_ids mixes token ids and lists of token ids")
        is_single = not given or isinstance(given[0], int)
        prompts = [given] if is_single else given
        for prompt in prompts:
            self._check(prompt)
        return prompts, is_single

    def _check(self, prompt: list[int]) -> None:
        if not prompt:
            raise ValueError("input_ids is empty; a prompt needs at least one token")
        vocab_size = self._config.vocab_size
        if outside := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ValueError(f"input_ids: token id {outside[0]} is outside the vocabulary of {vocab_size}")
        if len(prompt) >= self._context_length:
            raise ValueError(f"The input ({len(prompt)} tokens) is longer than the model's context length ({self._context_length} tokens).")

    def _sequence(self, rid: str, prompt: list[int], sampling: SamplingParams) -> Sequence:
        if sampling.stop and not self._has_tokenizer:
            raise ValueError("stop strings need a tokenizer.json in the model directory; use stop_token_ids")
        none: frozenset[int] = frozenset()
        stops = self._config.eos_token_ids | sampling.stop_token_ids
        ending, ignored = (none, stops) if sampling.ignore_eos else (stops, none)
        return Sequence(rid, prompt, sampling, self._limit(len(prompt), sampling), ending, ignored)

    def _limit(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        room, limit = self._context_length - num_prompt_tokens, sampling.token_limit
        if limit is not None and limit > room and sampling.max_new_tokens is not msgspec.UNSET:
            what = f"Requested token count exceeds the model's maximum context length of {self._context_length} tokens."
            parts = f"{num_prompt_tokens} tokens from the input messages and {limit} tokens for the completion."
            raise ValueError(f"{what} You requested a total of {num_prompt_tokens + limit} tokens: {parts}")
        # SGLang keeps one position free.
        return max(0, min(room - 1, room if limit is None else limit))


def _per_prompt(value: object, count: int, default: object) -> list[Any]:
    """One value a prompt, from a list of that length, one value for all, or the default."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise ValueError(f"a list of {len(value)} values for {count} prompts; give one for each prompt or one for all")
    return value


def _rids(rid: str | list[str] | None, count: int) -> list[str]:
    """Request ids as SGLang makes them: `rid_0`, `rid_1`, ... for a batch with one name."""
    if isinstance(rid, list):
        if len(rid) != count:
            raise ValueError("The specified rids length mismatch with the batch_size for batch processing.")
        if len(set(rid)) != len(rid):
            raise ValueError("rid: duplicate request ids within the batch")
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
    return rid
