"""Samples cut off in the middle (the worker leaves, the broker recalls the group, its time is out), and continued token by token.

engine aborts --> Unfinished(responses) --> give_back "partial" --> broker --> lease of any worker --> decode_partial
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rollout.samples.response import Completion, Response, Task, logprob_temperature, to_sample
from slimebus.bus.errors import ProtocolError
from slimebus.bus.messages import NO_VERSION, GiveBack, LeasedGroup
from slimebus.bus.samples import decode_group, encode_group

FINISH_REASON = {"completed": "stop", "truncated": "length", "aborted": "abort"}


class Unfinished(Exception):
    """A group was cut off; `responses` is what there is of it, those with finish_reason `abort` to be continued.

    num_new: where it was out of time, the tokens made since it was leased.
    """

    def __init__(self, responses: list[Response]) -> None:
        super().__init__(f"{sum(r.finish_reason == 'abort' for r in responses)} of {len(responses)} samples are unfinished")
        self.responses = responses
        self.num_new: int | None = None

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
        return sum(len(response.token_ids) for response in self.responses)


def empty_response(task: Task) -> Response:
    """A response that has not begun."""
    none = np.zeros(0, np.int32)
    return Response(task=task, token_ids=none, logprobs=none.astype(np.float32), versions=[], text="", finish_reason="abort")


def continue_response(begun: Response, more: Completion, versions: Sequence[tuple[int, int]]) -> Response:
    """One response from its beginning and the rest. versions: the runs of the rest."""
    return msgspec.structs.replace(
        begun,
        token_ids=np.concatenate([begun.token_ids, more.output_ids]),
        logprobs=np.concatenate([begun.logprobs, more.logprobs]),
        versions=join_runs(begun.versions, versions),
        finish_reason=more.finish_reason,
    )


def join_runs(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The runs (version, length) of two pieces, one behind the other."""
    runs: list[tuple[int, int]] = []
    for version, length in (*first, *second):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + length)
        elif length:
            runs.append((version, length))
    return runs


def prompt_of(begun: Response) -> np.ndarray:
    """What the engine continues: the prompt's tokens and those made so far, int32 [P + R]."""
    return np.concatenate([begun.prompt_ids, begun.token_ids]).astype(np.int32)


def sampling_of(begun: Response) -> dict[str, Any]:
    """The task's sampling parameters, less the tokens made so far; max_new_tokens 0 when none are left."""
    sampling, made = dict(begun.task.sampling), len(begun.token_ids)
    for name in ("max_new_tokens", "min_new_tokens"):
        if isinstance(sampling.get(name), int):
            sampling[name] = max(0, sampling[name] - made)
    return sampling


def mask_older(response: Response, version: int) -> None:
    """What an older version than this one made is context: loss_mask 0."""
    versions, lengths = np.array(response.versions, np.int64).reshape(-1, 2).T
    is_new = np.repeat(versions >= version, lengths).astype(np.uint8)
    response.loss_mask = is_new if response.loss_mask is None else response.loss_mask * is_new


def give_back_message(
    leased: LeasedGroup, lineage: str, responses: list[Response], reason: str = "worker left"
) -> tuple[GiveBack, list[bytes]]:
    """The message that hands a group over with what there is of it; without samples when nothing was made yet."""
    if not any(len(r.token_ids) for r in responses):
        return GiveBack(group=leased.group, lease=leased.lease, outcome="requeue", reason=reason), []
    message = GiveBack(group=leased.group, lease=leased.lease, outcome="partial", reason=reason, lineage=lineage)
    return message, encode_group([to_sample(r) for r in responses])


def decode_partial(tasks: list[Task], frames: Sequence[Any]) -> list[Response]:
    """The responses to continue, one for each task. Raises ProtocolError when they are not of these tasks."""
    samples = decode_group(frames)
    if len(samples) != len(tasks):
        raise ProtocolError(f"partial of group {tasks[0].group}: {len(samples)} samples for {len(tasks)} to make")
    return [_response(task, sample) for task, sample in zip(tasks, samples, strict=True)]


def _response(task: Task, sample: Any) -> Response:
    size = len(task.prompt_ids)
    if not np.array_equal(sample.tokens[:size], task.prompt_ids) or sample.status not in FINISH_REASON:
        raise ProtocolError(f"partial of group {task.group}: it does not begin with the prompt's tokens; is the tokenizer another one?")
    if sample.temperature != logprob_temperature(task.sampling):
        raise ProtocolError(f"partial of group {task.group}: it was begun at temperature {sample.temperature}, and it is another one now")
    runs = [(version, length) for version, length in sample.versions if length]
    if size and (not runs or runs[0] != (NO_VERSION, size)):
        raise ProtocolError(f"partial of group {task.group}: the prompt's tokens must have no version")
    return Response(
        task=task,
        token_ids=np.array(sample.tokens[size:], np.int32),
        logprobs=np.array(sample.rollout_logprobs[size:], np.float32),
        versions=runs[1:] if size else runs,
        text="",
        finish_reason=FINISH_REASON[sample.status],
    )
