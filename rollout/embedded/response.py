"""Finished (or growing) sequences as SGLang's JSON."""

import time
from itertools import repeat
from typing import Any

from tokenizers import Tokenizer

from rollout.embedded.sequence import Sequence


def answer(sequence: Sequence, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """`{text, output_ids, meta_info}` of one sequence; mid-stream its finish_reason is null. Logprobs are [logprob, token id, null]."""
    spans = [{"version": version, "start": start, "end": end} for version, start, end in sequence.version_spans]
    info: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason,
        "prompt_tokens": len(sequence.prompt),
        "weight_version": spans[-1]["version"] if spans else "default",
        "weight_versions": spans,
        "num_retractions": sequence.num_retractions,
        "completion_tokens": len(sequence.output_ids),
        "cached_tokens": sequence.num_cached_tokens,
        "e2e_latency": (sequence.finished_s or time.monotonic()) - sequence.created_s,
    }
    if sequence.return_logprob:
        scored = [] if sequence.logprob_start is None else sequence.prompt[sequence.logprob_start :]
        info["input_token_logprobs"] = list(zip([None, *sequence.input_logprobs], scored, repeat(None))) if scored else []
        info["output_token_logprobs"] = list(zip(sequence.output_logprobs, sequence.output_ids, repeat(None)))
    return {"text": output_text(sequence, tokenizer), "output_ids": list(sequence.output_ids), "meta_info": info}


def output_text(sequence: Sequence, tokenizer: Tokenizer | None) -> str:
    """Text of the output without the stop token or stop string (unless no_stop_trim); "" without a tokenizer."""
    if tokenizer is None:
        return ""
    matched = (sequence.finish_reason or {}).get("matched")
    is_trimmed = not sequence.sampling.no_stop_trim
    ids = sequence.output_ids[:-1] if is_trimmed and isinstance(matched, int) else sequence.output_ids
    text: str = tokenizer.decode(ids, skip_special_tokens=sequence.sampling.skip_special_tokens)
    at = text.find(matched) if is_trimmed and isinstance(matched, str) else -1  # 0 for an empty one, as SGLang
    return text[:at] if at >= 0 else text
