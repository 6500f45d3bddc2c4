"""The screen of `slimebus top`: the panel of `slimebus up`, and a table for each part of the status."""

from collections.abc import Callable, Mapping
from typing import Any

from textual import work
from textual.app import App, ComposeResult
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane, Tabs

from slimebus.bus.errors import SlimebusError
from slimebus.cli.commands.status import client_row, text_of
from slimebus.cli.formatting import count
from slimebus.view.live_panel import LivePanel

EVERY_S = 1.0
Row = Mapping[str, Any]


def tables(status: dict[str, Any]) -> dict[str, list[Row]]:
    """The rows of each tab, newest first where they are in time; the first row's keys are the columns."""
    phases = [{"groups": phase, "number": number, "tokens": None} for phase, number in status["groups"].items()]
    wasted = [{"groups": f"wasted: {why}", "number": one["groups"], "tokens": count(one["tokens"])} for why, one in status["waste"].items()]
    return {
        "Workers": [client_row(client, status["version"]) for client in status["clients"]],
        "Steps": [{"step": row["step"]} | {name: row["metrics"].get(name) for name in STEP} for row in reversed(status["steps"])],
        "Evaluations": [{key: row[key] for key in EVALUATION} for row in reversed(status["evaluations"])],
        "Groups": [*phases, *wasted],
        "Lag": [{"lag": lag, "groups": groups} for lag, groups in status["lag"]["histogram"].items()],
        "Waiting": [{"who waits for whom": sentence} for sentence in status["waiting"]],
        "Settings": [{"setting": name, "value": value} for name, value in status["settings"].items()],
    }


EVALUATION = ("dataset", "version", "mean_reward", "low", "high", "num_samples", "num_failed")
STEP = ("reward", "loss", "lag_mean", "lag_max", "grad_norm", "num_tokens", "wait_s", "train_s")


class Top(App[None]):
    """Shows the status once a second. ask: gives it, or raises SlimebusError, whose text is shown until the next answer."""

    TITLE = "slimebus top"
    BINDINGS = [("q", "quit", "Quit")]
    CSS = "#panel { height: 9; } TabbedContent, TabPane, DataTable { height: 1fr; }"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, ask: Callable[[], dict[str, Any]], *, is_supervised: bool = False) -> None:
        super().__init__()
        self.ask = ask
        self.panel = LivePanel("", is_supervised=is_supervised)

    def compose(self) -> ComposeResult:
        """The panel above, a tab for each table below."""
        yield Static("asking the broker", id="panel", markup=False)
        with TabbedContent():
            for name in ("Workers", "Steps", "Evaluations", "Groups", "Lag", "Waiting", "Settings"):
                with TabPane(name, id=name.lower()):
                    yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_ready(self) -> None:
        """Ask now, and from now on; the arrow keys go from tab to tab."""
        self.query_one(Tabs).focus()
        self.look()
        self.set_interval(EVERY_S, self.look)

    @work(thread=True, exclusive=True)
    def look(self) -> None:
        """Ask, in a thread, so that keys work while the broker is away."""
        try:
            found = self.ask()
        except SlimebusError as bad:
            self.call_from_thread(self.query_one("#panel", Static).update, bad.text)
        else:
            self.call_from_thread(self.show, found)

    def show(self, found: dict[str, Any]) -> None:
        """Put this status on the screen; tables keep their place."""
        self.panel.title = f"{found['run']}: {found['state']}"
        self.panel.take(found)
        self.query_one("#panel", Static).update(self.panel.render())
        for name, rows in tables(found).items():
            fill(self.query_one(f"#{name.lower()}", TabPane).query_one(DataTable), rows)


def fill(table: "DataTable[str]", rows: list[Row]) -> None:
    """Show these rows instead of those that it has; the cursor stays where it is."""
    at = table.cursor_row
    table.clear(columns=True)
    table.add_columns(*(list(rows[0]) if rows else ["nothing yet"]))
    for row in rows:
        table.add_row(*(text_of(row.get(name)) for name in rows[0]))
    table.move_cursor(row=min(at, max(0, len(rows) - 1)))
