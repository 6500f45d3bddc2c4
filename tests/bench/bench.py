"""`bin/bench AREA`: measures an area and prints a table; each ratio is to a limit or a peer measured in the same run."""

import importlib
import json
import os
import sys
from pathlib import Path

import click
from bench_row import Row
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
AREAS = ("broker", "connections", "e2e", "rollout", "seeing", "trainer", "weights")
COLUMNS = ("name", "value", "unit", "reference", "ratio", "goal")


@click.command()
@click.argument("area", type=click.Choice(AREAS))
@click.option("--quick", is_flag=True, help="Less work, for a look; numbers to quote come from the full run.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="[path] Write the rows here, one JSON object a line.")
@click.option("--markdown", is_flag=True, help="Print the rows as a table in Markdown, as the docs have them.")
def bench(area: str, quick: bool, json_file: Path | None, markdown: bool) -> None:
    """Measure AREA; exit with 1 when a goal is missed."""
    load = os.getloadavg()[0]
    rows: list[Row] = importlib.import_module(f"bench_{area}").rows(quick)
    if json_file is not None:
        json_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if markdown:
        click.echo(markdown_table(rows))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table(area, rows))
    click.echo(f"{os.cpu_count()} CPU cores; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


def markdown_table(rows: list[Row]) -> str:
    """The rows for a document; a goal that is missed says so."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    for row in rows:
        cells = ["" if row[name] is None else str(row[name]) for name in COLUMNS]
        lines.append(" | ".join([f"`{cells[0]}`", *cells[1:-1], cells[-1] + ("" if row["ok"] else ", missed")]))
    return "\n".join(f"| {line} |" for line in lines)


def table(area: str, rows: list[Row]) -> Table:
    """The rows for a person."""
    shown = Table(title=f"bench {area}", title_justify="left")
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name in ("name", "unit", "goal") else "right", no_wrap=name != "unit")
    shown.add_column("")
    for row in rows:
        mark = "[green]ok[/]" if row["goal"] and row["ok"] else "[red]missed[/]" if row["goal"] else ""
        shown.add_row(*("" if row[name] is None else str(row[name]) for name in COLUMNS), mark)
    return shown


if __name__ == "__main__":
    bench()
