"""The body of `/generate`: checked, then expanded to sequences."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.engine.sampling_params import Sampling, SamplingParams
from rollout.engine.sequence import Sequence

if TYPE_CHECKING:
    from rollout.engine.model_config import ModelConfig
    from rollout.engine.text import TextCodec


class GenerateBody(msgspec.Struct, kw_only=True):
    """`/generate` as SGLang takes it; fields not listed here are ignored, as SGLang ignores what it does not know."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    rid: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    stream: bool = False


class Expanded(msgspec.Struct):
    """Sequences of one body, grouped by prompt, and whether the answer is one object or a list."""

    sequences: list[Sequence]
    is_single: bool


class RequestExpander:
    """Turns a body into sequences of one model; ValueError says what of the body cannot be served."""

    def __init__(self, config: ModelConfig, context_length: int, codec: TextCodec | None) -> None:
        self._config, self._context_length, self._codec = config, context_length, codec

    def expand(self, body: GenerateBody) -> Expanded:
        """One sequence a prompt, or n of each; ranges, token ids and lengths checked."""
        prompts, is_single = self._prompts(body)
        count = len(prompts)
        samplings = [params.resolved(self._config.vocab_size) for params in _per_prompt(body.sampling_params, count, SamplingParams())]
        if len({sampling.n for sampling in samplings}) > 1:
            raise ValueError("sampling_params: n must be the same for all prompts of a batch")
        copies = samplings[0].n
        rids = _rids(body.rid, count, copies)
        logprobs = _per_prompt(body.return_logprob, count, False)
        starts = _per_prompt(body.logprob_start_len, count, -1)
        tops = _per_prompt(body.top_logprobs_num, count, 0)
        sequences = [
            self._sequence(
                rids[index * copies + copy],
                prompts[index],
                samplings[index],
                return_logprob=logprobs[index],
                logprob_start=starts[index] if logprobs[index] and 0 <= starts[index] < len(prompts[index]) else None,
                num_top_logprobs=min(max(tops[index], 0), self._config.vocab_size) if logprobs[index] else 0,
                stream=body.stream,
            )
            for index in range(count)
            for copy in range(copies)
        ]
        return Expanded(sequences, is_single and copies == 1)

    def _prompts(self, body: GenerateBody) -> tuple[list[list[int]], bool]:
        if (body.text is None) == (body.input_ids is None):
            raise ValueError("give either text or input_ids, exactly one of them")
        if body.text is not None:
            texts = [body.text] if isinstance(body.text, str) else body.text
            return self._checked([self._encode(text) for text in texts]), isinstance(body.text, str)
        ids = body.input_ids or []
        flat = [item for item in ids if isinstance(item, int)]
        nested = [item for item in ids if isinstance(item, list)]
        if flat and nested:
            raise ValueError("input_ids mixes token ids and lists of token ids")
        return self._checked(nested if nested else [flat]), not nested

    def _encode(self, text: str) -> list[int]:
        if self._codec is None:
            raise ValueError("this model directory has no tokenizer.json; send input_ids instead of text")
        return self._codec.encode(text)

    def _checked(self, prompts: list[list[int]]) -> list[list[int]]:
        vocab_size = self._config.vocab_size
        for prompt in prompts:
            if not prompt:
                raise ValueError("input_ids is empty; a prompt needs at least one token")
            if min(prompt) < 0 or max(prompt) >= vocab_size:
                outside = next(token for token in prompt if not 0 <= token < vocab_size)
                raise ValueError(f"input_ids: token id {outside} is outside the vocabulary of {vocab_size}")
            if len(prompt) >= self._context_length:
                raise ValueError(
                    f"The input ({len(prompt)} tokens) is longer than the model's context length ({self._context_length} tokens)."
                )
        return prompts

    def _sequence(self, rid: str, prompt: list[int], sampling: Sampling, **asked: Any) -> Sequence:
        if sampling.stop and self._codec is None:
            raise ValueError("stop strings need a tokenizer.json in the model directory; use stop_token_ids")
        stops = frozenset() if sampling.ignore_eos else self._config.eos_token_ids | sampling.stop_token_ids
        return Sequence(rid, prompt, sampling, self._limit(len(prompt), sampling.max_new_tokens), stops, **asked)

    def _limit(self, num_prompt_tokens: int, max_new_tokens: int | None) -> int:
        room = self._context_length - num_prompt_tokens
        if max_new_tokens is not None and max_new_tokens > room:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {self._context_length} tokens. You requested "
                f"a total of {num_prompt_tokens + max_new_tokens} tokens: {num_prompt_tokens} tokens from the input messages and "
                f"{max_new_tokens} tokens for the completion."
            )
        # SGLang keeps one position free.
        return max(0, min(room - 1, room if max_new_tokens is None else max_new_tokens))


def _per_prompt(value: object, count: int, default: object) -> list[Any]:
    """One value a prompt, from a list of that length, one value for all, or the default."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise ValueError(f"a list of {len(value)} values for {count} prompts; give one for each prompt or one for all")
    return value


def _rids(rid: str | list[str] | None, count: int, copies: int) -> list[str]:
    """Request ids as SGLang makes them: `rid_0`, `rid_1`, ... for a batch with one name, fresh ones for n > 1."""
    if isinstance(rid, list):
        if len(rid) != count:
            raise ValueError("The specified rids length mismatch with the batch_size for batch processing.")
        if len(set(rid)) != len(rid):
            raise ValueError("rid: duplicate request ids within the batch")
    if rid is None or copies > 1:
        return [uuid.uuid4().hex for _ in range(count * copies)]
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
    return rid
