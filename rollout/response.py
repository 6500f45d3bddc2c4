"""What hooks see: a task to sample, and the responses made for it.

A generate hook turns a Task into one or more Responses; a reward scores a Response. P prompt tokens and R response tokens
become one sample of T = P + R tokens.
"""

from typing import Any

import msgspec
import numpy as np

from slimebus.messages import NO_VERSION, Scalar
from slimebus.samples import Sample

STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


class Task(msgspec.Struct, kw_only=True):
    """One sample to make. prompt: text or chat messages, as in the data; index: which of the group's n samples this is."""

    prompt: str | list[dict[str, Any]]
    prompt_ids: np.ndarray
    sampling: dict[str, Any]
    label: Any = None
    metadata: dict[str, Any] = {}
    group: str = ""
    dataset: str = ""
    index: int = 0


class Response(msgspec.Struct, kw_only=True):
    """One response to a task.

    token_ids int32 [R], logprobs float32 [R] under the policy that made them, versions: runs (version, length) over R
    (NO_VERSION for tokens no policy made), loss_mask uint8 [R] (None: all 1), text without the end token, finish_reason:
    stop | length | abort. A hook may set `reward` itself; then no reward function is called.
    """

    task: Task
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: list[tuple[int, int]]
    text: str
    finish_reason: str = "stop"
    loss_mask: np.ndarray | None = None
    reward: float | None = None
    turn: int = 0
    session: str = ""
    metadata: dict[str, Scalar] = {}
    extras: dict[str, np.ndarray] = {}

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        """The task's prompt, as in the data."""
        return self.task.prompt

    @property
    def label(self) -> Any:
        """What the reward compares with."""
        return self.task.label


def to_sample(response: Response, *, failed: bool = False) -> Sample:
    """The trainable sequence: prompt tokens masked out, response tokens as the response says."""
    prompt, made = response.task.prompt_ids, response.token_ids
    mask = np.ones(len(made), np.uint8) if response.loss_mask is None else response.loss_mask
    versions = [(NO_VERSION, len(prompt)), *response.versions] if len(prompt) else response.versions
    return Sample(
        tokens=np.concatenate([prompt, made]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(len(prompt), np.uint8), mask]).astype(np.uint8),
        rollout_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), response.logprobs]).astype(np.float32),
        versions=versions,
        reward=None if failed else response.reward,
        status="failed" if failed else STATUS.get(response.finish_reason, "completed"),
        trajectory=response.task.index,
        session=response.session,
        turn=response.turn,
        metadata=response.metadata,
        extras=response.extras,
    )
