"""`slimebus compare`: the tables and plots of a sweep, of runs that exist."""

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="RUN...")
@click.option(
    "--axis", default="", help="[name] What is compared; default: broker.max_staleness where the runs differ in it, else the last."
)
@click.option("--score", default="", help="[name] The evaluation to compare by; default: heldout, or the first.")
@click.option("--out", type=click.Path(path_type=Path), help="[path] Folder for report.html and results.json.")
def compare(runs: tuple[Path, ...], axis: str, score: str, out: Path | None) -> None:
    """Compare runs by what their settings differ in; runs that differ in their seed alone are taken together (docs/sweep.md).

    RUN is a run's directory, or a sweep's: then all of its trials.
    """
    from slimebus.sweep.comparison import check_installed, show
    from slimebus.sweep.results import of_runs

    check_installed()
    show(of_runs(runs, score, axis), axis, out, title="Comparison", about="slimebus compare " + " ".join(map(str, runs)))
