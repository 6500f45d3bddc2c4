"""`slimebus export`: a checkpoint as a Hugging Face directory."""

from collections.abc import Callable
from pathlib import Path

from slimebus.bus.errors import UsageError
from slimebus.config import Resolved
from trainer.checkpoint.folder import complete_checkpoints, latest_checkpoint, step_of
from trainer.compat.cpu_compat import import_megatron


def check_export(resolved: Resolved, out: Path, step: int | None, *, force: bool) -> None:
    """Raise UsageError before anything heavy is loaded: `out` is in use, or there is no such checkpoint."""
    if not force and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty; give another path, or --force to replace it")
    folder = resolved.run_dir / "checkpoints"
    kept = [step_of(path) for path in complete_checkpoints(folder)]
    if not kept:
        raise UsageError(f"{folder}: no checkpoint; has the run saved one (trainer.save_interval)?")
    if step is not None and step not in kept:
        raise UsageError(f"{folder}: no checkpoint of step {step}; it has those of steps {', '.join(map(str, kept))}")
    latest_checkpoint(folder)


def export_checkpoint(resolved: Resolved, out: Path, step: int | None, say: Callable[[str], None]) -> int | None:
    """Write a checkpoint, the newest or that of `step`, to `out` in Hugging Face layout; the number of steps it has trained, on rank 0
    alone. say: told what is done now.

    Raises DataError when the checkpoint is damaged.
    """
    say("loading megatron-core")
    import_megatron()
    from trainer.checkpoint.load import load_weights
    from trainer.model.parallel import is_main_rank
    from trainer.model.policy import Policy

    say(f"building the model of {resolved.model_dir}")
    policy = Policy.build(resolved.config, str(resolved.model_dir), resolved.base)
    try:
        say(f"reading the {'newest checkpoint' if step is None else f'checkpoint of step {step}'} of {resolved.run_dir / 'checkpoints'}")
        found = load_weights(resolved.run_dir / "checkpoints", policy, step)
        assert found is not None  # check_export() has seen it
        say(f"writing {out}")
        policy.save_hf(str(out))
        return found.step if is_main_rank() else None
    finally:
        policy.close()
