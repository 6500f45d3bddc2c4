"""Each role leaves first once, in good order and by kill -9; `bin/chaos --leaving` has all orders."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from chaos_run import make_task
from leaving import ROLES, leave

TURNS = tuple(ROLES[i:] + ROLES[:i] for i in range(len(ROLES)))


@pytest.mark.integration
@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("order", TURNS, ids="-".join)
def test_whoever_leaves_first_the_others_end_in_good_order(tmp_path: Path, order: tuple[str, ...], first: signal.Signals) -> None:
    assert leave(tmp_path / "run", make_task(tmp_path / "task"), order, first) == []
