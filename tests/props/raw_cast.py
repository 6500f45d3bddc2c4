"""A trainer and a worker by their raw messages, for tests of a live broker. The trainer commits version v of step v at once."""

import numpy as np

from slimebus.messages import Batch, BatchReply, Commit, Fetch, FetchReply, LeasedGroup, Publish, Put, PutReply, Resume
from slimebus.samples import Sample, decode_stored, encode_group
from slimebus.transport.client import Client

LINEAGE = "L"


def begin(trainer: Client) -> None:
    """Resume at step 0 and publish version 0."""
    trainer.call(Resume(step=0, version=0, lineage=LINEAGE))
    trainer.call(Publish(lineage=LINEAGE, version=0, publishers=["tcp://t"]))


def sample(version: int, length: int = 5) -> Sample:
    """A rewarded sample of so many trained tokens, made by one version."""
    return Sample(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        rollout_logprobs=np.full(length, -0.5, np.float32),
        versions=[(version, length)],
        reward=1.0,
    )


def put(worker: Client, group: LeasedGroup, samples: list[Sample]) -> PutReply:
    """Put the samples of a leased group."""
    headers, fields, frames = encode_group(samples)
    done = Put(group=group.group, lease=group.lease, attempt=group.attempt, lineage=LINEAGE, samples=headers, fields=fields)
    return worker.call(done, frames, timeout_s=60).expect(PutReply)


def train(trainer: Client, step: int, *, wait_s: float = 60.0, checkpoint: int | None = None) -> dict[str, list[Sample]]:
    """The groups of a step with their samples, fetched; then the next version is published and the step committed."""
    reply = trainer.call(Batch(step=step, wait_s=wait_s), timeout_s=wait_s + 30).expect(BatchReply)
    names = [group.group for group in reply.groups]
    assert names, reply.reason
    fetched = trainer.call(Fetch(groups=names), timeout_s=60)
    found = dict(zip(names, decode_stored(fetched.expect(FetchReply).num_frames, fetched.bulk), strict=True))
    trainer.call(Publish(lineage=LINEAGE, version=step + 1, publishers=["tcp://t"]))
    trainer.call(Commit(step=step, checkpoint=step if checkpoint is None else checkpoint))
    return found
