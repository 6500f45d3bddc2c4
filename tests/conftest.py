"""What tests of several folders share is imported by its file's name: `from live_broker import LiveBroker`."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "props"))


@pytest.fixture
def closing() -> Iterator[Callable[..., Any]]:
    """Takes what a test opens and gives it back; closes it all when the test is done, newest first. how: arguments of close."""
    with contextlib.ExitStack() as stack:

        def keep(closable: Any, **how: Any) -> Any:
            stack.callback(closable.close, **how)
            return closable

        yield keep
