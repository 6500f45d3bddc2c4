"""What tests of several folders share is imported by its file's name: `from live_broker import LiveBroker`."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any machine")  # what takes long on a busy machine is no failure
sys.path.insert(0, str(Path(__file__).parent / "fixtures"))


@pytest.fixture
def closing() -> Iterator[Callable[..., Any]]:
    """Takes what a test opens and gives it back; closes it all when the test is done, newest first. how: arguments of close."""
    with contextlib.ExitStack() as stack:

        def keep(closable: Any, **how: Any) -> Any:
            stack.callback(closable.close, **how)
            return closable

        yield keep


SLOW_FIRST = (
    *("integration/test_learning_run", "integration/test_parallel_layouts", "chaos/test_chaos", "integration/test_agent_calculator"),
    *("simulation/", "integration/", "chaos/"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests begin first: of the processes that share the files, none is left with a long one at the end."""

    def turn(item: pytest.Item) -> int:
        return next((number for number, part in enumerate(SLOW_FIRST) if f"tests/{part}" in item.path.as_posix()), len(SLOW_FIRST))

    items.sort(key=turn)
