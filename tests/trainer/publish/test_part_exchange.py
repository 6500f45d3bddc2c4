"""What publishing ranks tell rank 0, over a store that all of them see."""

import threading
import time

import pytest
from torch.distributed import HashStore

from slimebus.bus.errors import WeightsError
from slimebus.weights.store.version_store import VersionInfo
from slimebus.weights.tensors import TensorForm
from trainer.publish import part_exchange as exchange_module
from trainer.publish.part_exchange import PartExchange, RankPartReport


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def part(rank: int, num_tensors: int = 1) -> RankPartReport:
    forms = tuple(TensorForm(f"r{rank}.t{i}", "bfloat16", (2, 3), "0" * 32) for i in range(num_tensors))
    made = VersionInfo("l", 4, "d", forms, num_values=6, num_changed=0, total_bytes=12, delta_bytes=0, encode_s=0.5, stage_s={"diff": 0.1})
    return RankPartReport(address=f"tcp://h:{rank}", made=made)


def test_parts_come_in_the_order_of_the_ranks_whoever_is_first(store: HashStore) -> None:
    mine, theirs = PartExchange(store, "l"), PartExchange(store, "l")
    theirs.post(4, 3, part(3))
    threading.Timer(0.05, theirs.post, (4, 2, part(2))).start()
    assert mine.collect(4, [2, 3], timeout_s=10) == [part(2), part(3)]


def test_a_part_larger_than_the_store_takes_at_once_travels_in_pieces(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "PIECE_BYTES", 1000)
    PartExchange(store, "l").post(0, 1, part(1, num_tensors=200))
    assert PartExchange(store, "l").collect(0, [1], timeout_s=1) == [part(1, num_tensors=200)]


def test_what_was_collected_is_not_kept(store: HashStore) -> None:
    before = store.num_keys()
    PartExchange(store, "l").post(0, 1, part(1))
    PartExchange(store, "l").collect(0, [1], timeout_s=1)
    assert store.num_keys() == before


def test_the_deadline_names_the_rank_and_the_version(store: HashStore) -> None:
    PartExchange(store, "l").post(7, 1, part(1))
    with pytest.raises(WeightsError, match=r"version 7 is not announced: rank 2 did not complete its part"):
        PartExchange(store, "l").collect(7, [1, 2], timeout_s=0.03)


def test_a_part_of_another_version_or_lineage_is_not_taken(store: HashStore) -> None:
    PartExchange(store, "l").post(6, 1, part(1))
    PartExchange(store, "older").post(7, 1, part(1))
    with pytest.raises(WeightsError, match="rank 1"):
        PartExchange(store, "l").collect(7, [1], timeout_s=0.03)


def test_a_rank_that_failed_is_not_waited_for(store: HashStore) -> None:
    PartExchange(store, "l").post(7, 1, RankPartReport(problem="MemoryError: no room"))
    with pytest.raises(WeightsError, match="rank 1 has no part of it: MemoryError: no room"):
        PartExchange(store, "l").collect(7, [1], timeout_s=60)


def test_closing_ends_a_wait(store: HashStore) -> None:
    board = PartExchange(store, "l")
    threading.Timer(0.05, board.close).start()
    started = time.monotonic()
    with pytest.raises(WeightsError, match="leaving"):
        board.collect(0, [1], timeout_s=60)
    assert time.monotonic() - started < 5


def test_the_other_ranks_serve_until_rank_0_ends_the_run(store: HashStore) -> None:
    waiting = PartExchange(store, "l")
    assert not waiting.wait_for_end(timeout_s=0.01)
    PartExchange(store, "l").end()
    assert waiting.wait_for_end(timeout_s=1)
    assert not PartExchange(store, "next").wait_for_end(timeout_s=0.01)
