"""`slimebus sweep` and `slimebus compare`: many runs that answer one question."""

import json
from pathlib import Path

import click


@click.command()
@click.argument("sweep_yaml", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Check the config of every trial and list them; start nothing.")
@click.option("--report", is_flag=True, help="Compare the trials that are over, and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --check: one JSON object, trial to its mistakes.")
def sweep(sweep_yaml: Path, check: bool, report: bool, as_json: bool) -> None:
    """Run every trial of SWEEP.yaml that is not over yet, then compare them (docs/sweep.md).

    Each trial is a `slimebus up` in a run directory of its own. Restarted, the sweep continues where it ended. A
    trial that fails is a line of the table with its reason; an option that does not exist is refused before anything starts.
    """
    from slimebus.process.launch import interrupt_on_sigterm
    from slimebus.sweep import plan
    from slimebus.sweep.comparison import check_installed, show_comparison
    from slimebus.sweep.results import read_sweep
    from slimebus.sweep.runner import Runner

    found = plan.load(sweep_yaml)
    if check:
        problems = plan.refusals(found)
        lines = [f"{trial.name}: {'; '.join(problems.get(trial.name, ['ok']))}" for trial in found.trials]
        click.echo(json.dumps(problems) if as_json else "\n".join(lines))
        return
    check_installed()
    interrupt_on_sigterm()
    runner = Runner(found, click.echo)
    try:
        if not report:
            runner.run()
    finally:
        if any(outcome.state == "done" for outcome in runner.outcomes.values()):
            results = read_sweep(found, runner.outcomes)
            show_comparison(results, found.plan.axis, found.folder, title=f"Sweep {sweep_yaml.stem}", about=sweep_yaml.read_text())


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
    from slimebus.sweep.comparison import check_installed, show_comparison
    from slimebus.sweep.results import read_runs

    check_installed()
    show_comparison(read_runs(runs, score, axis), axis, out, title="Comparison", about="slimebus compare " + " ".join(map(str, runs)))
