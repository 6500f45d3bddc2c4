"""`slimebus top`, driven by keys as a person drives it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from made_status import WHOLE
from textual.pilot import Pilot
from textual.widgets import DataTable, Static, TabbedContent, TabPane

from slimebus.bus.errors import Unreachable
from slimebus.view.top import Top


def drive(ask: Callable[[], dict[str, Any]], steps: Callable[[Top, Pilot[None]], Awaitable[None]]) -> None:
    """Start it on a screen of 100 x 30, wait for its first look, then do `steps`."""

    async def run() -> None:
        app = Top(ask)
        async with app.run_test(size=(100, 30)) as pilot:
            await shown(app, pilot, lambda text: "asking" not in text)
            await steps(app, pilot)

    asyncio.run(run())


async def shown(app: Top, pilot: Pilot[None], is_there: Callable[[str], bool]) -> None:
    """Wait until the panel's text is as wanted; the test's own deadline ends it otherwise."""
    while not is_there(panel(app)):
        await pilot.pause(0.01)
    await pilot.pause()


def panel(app: Top) -> str:
    """The text above the tables."""
    console = app.console
    with console.capture() as capture:
        console.print(app.query_one("#panel", Static).content, markup=False)
    return capture.get()


def cells(app: Top, tab: str) -> list[list[str]]:
    """What a table shows, its header first."""
    table = app.query_one(f"#{tab}", TabPane).query_one(DataTable)
    header = [str(column.label) for column in table.ordered_columns]
    return [header, *(list(map(str, table.get_row_at(i))) for i in range(table.row_count))]


def test_the_panel_and_every_table_show_the_status() -> None:
    async def steps(app: Top, pilot: Pilot[None]) -> None:
        assert "3/8" in panel(app)
        assert "mine: running" in panel(app)
        assert cells(app, "workers")[1] == ["t", "trainer", "training", "-", "-", "0", "-", "0 s ago"], "a step's tokens are no rate"
        assert cells(app, "workers")[3] == ["w2", "rollout", "serving", "2", "1", "8", "1.2 k", "1 s ago"]
        assert cells(app, "steps")[1][:2] == ["2", "0.25"]
        assert cells(app, "evaluations")[1] == ["held", "0", "0.5", "0.4", "0.6", "90", "0"]
        assert ["wasted: stale", "3", "9"] in cells(app, "groups")
        assert cells(app, "lag")[1:] == [["0", "5"], ["2", "27"]]
        assert cells(app, "waiting")[1] == ["trainer waits for batch 3"]
        assert ["max_staleness", "2"] in cells(app, "settings")

    drive(lambda: WHOLE, steps)


def test_keys_go_from_tab_to_tab_and_q_leaves() -> None:
    async def steps(app: Top, pilot: Pilot[None]) -> None:
        tabs = app.query_one(TabbedContent)
        await pilot.press("right", "right")
        await pilot.pause()
        assert tabs.active == "evaluations"
        await pilot.press("q")
        assert not app.is_running

    drive(lambda: WHOLE, steps)


def test_an_absent_broker_is_named_and_the_run_is_shown_again_once_it_answers() -> None:
    answers = []

    def ask() -> dict[str, Any]:
        if not answers:
            raise Unreachable("no broker answers at tcp://[x]:1")
        return answers[0]

    async def steps(app: Top, pilot: Pilot[None]) -> None:
        await shown(app, pilot, lambda text: "no broker answers at tcp://[x]:1" in text)
        answers.append(WHOLE)
        await shown(app, pilot, lambda text: "3/8" in text)

    drive(ask, steps)


def test_a_run_without_steps_or_workers_has_empty_tables() -> None:
    async def steps(app: Top, pilot: Pilot[None]) -> None:
        assert cells(app, "steps") == [["nothing yet"]]
        assert cells(app, "workers") == [["nothing yet"]]

    drive(lambda: {**WHOLE, "steps": [], "clients": [], "evaluations": [], "waiting": []}, steps)
