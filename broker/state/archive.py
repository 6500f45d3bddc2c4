"""Records of steps freed long ago: on disk only, needed by a trainer that goes far behind its checkpoint.

Which they are is kept as ranges [start, stop): a trainer may begin at any step, and nothing may take time for steps that never were.
"""

from collections.abc import Iterator

import msgspec

from broker.state.records import StepRecord
from broker.state.table import State


def put(state: State, record: StepRecord) -> None:
    """Have a record leave memory."""
    record.metrics = {}
    state.save("freed", str(record.step), msgspec.msgpack.encode(record))
    del state.steps[record.step]
    state.changed("steps", record.step)
    ranges = state.meta.archived
    if ranges and ranges[-1][1] == record.step:
        ranges[-1] = (ranges[-1][0], record.step + 1)
    else:
        ranges.append((record.step, record.step + 1))


def steps(state: State, first: int, stop: int) -> Iterator[int]:
    """The archived steps of [first, stop), in the order in which they were archived."""
    for begin, end in list(state.meta.archived):
        yield from range(max(begin, first), min(end, stop))


def recall(state: State, first: int) -> None:
    """Have the records of steps from `first` on in memory again."""
    for step in steps(state, first, state.meta.next_step):
        record = state.step_record(step)
        if record is not None:
            state.steps[step] = record
            state.changed("steps", step)
            state.delete("freed", str(step))
    state.meta.archived = [(begin, min(end, first)) for begin, end in state.meta.archived if begin < first]
