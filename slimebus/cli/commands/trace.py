"""`slimebus trace`: the timeline of a run."""

from pathlib import Path

import click

from slimebus.config.flags import RunCommand, RunTarget, of_run


@click.command(cls=RunCommand)
@of_run("[RUN_DIR]...")
@click.option(
    "--out", type=Path, help="[path] Chrome trace events, for ui.perfetto.dev; default: RUN_DIR/trace.json, of a step trace-STEP.json."
)
@click.option("--step", type=click.IntRange(min=0), help="[step] Write the life of each sample that this step trained.")
def trace(run: RunTarget, out: Path | None, step: int | None) -> None:
    """Write what trainer and workers did as a timeline: steps, publishing, pulls, loads, sampled groups.

    With --step: each sample of a step from its prompt to its training, over all processes.
    RUN_DIR is a run's directory, one for each host of the run; without one, the run directory of RUN.yaml.
    """
    from slimebus.view import trace as timeline

    run_dirs = [Path(folder) for folder in run.names] or [run.resolved.run_dir]
    out = out or run_dirs[0] / ("trace.json" if step is None else f"trace-{step}.json")
    recorded = timeline.read(run_dirs)
    spans = timeline.work_spans(recorded) if step is None else timeline.sample_lives(recorded, step)
    timeline.write_chrome(spans, out)
    click.echo(f"{out}: {len(spans)} spans; open it in ui.perfetto.dev")
