"""`bin/bench rollout`: how fast samples are made, and what a worker adds to its engine. Each function of ROWS measures one thing."""

from collections.abc import Callable
from itertools import chain

import bench_dispatch
import bench_engine
import bench_partial
import bench_session
import bench_worker
from bench_row import Row

ROWS: list[Callable[[bool], list[Row]]] = [
    *(bench_engine.against_transformers, bench_engine.against_sglang, bench_engine.prefill_reuse),
    *(bench_session.session_overhead, bench_worker.worker_ratio, bench_worker.update_loss),
    *(bench_partial.gain, bench_dispatch.dispatch_2048),
]
"""Each takes `quick`, whether less work will do."""


def rows(quick: bool) -> list[Row]:
    """All rows, in order."""
    return list(chain.from_iterable(measure(quick) for measure in ROWS))
