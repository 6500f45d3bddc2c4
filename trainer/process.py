"""The process around the loop: ranks, logs, signals, the connection to the broker."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from slimebus.bus.errors import SlimebusError, UsageError
from slimebus.bus.transport.request import SILENT_S
from slimebus.config import Resolved
from slimebus.config.engine_plan import visible
from slimebus.config.file_checks import trainer_problems
from slimebus.config.load import raise_all
from slimebus.process.launch import end_with_parent
from slimebus.security.exposure import check_bind
from slimebus.telemetry import logs
from slimebus.telemetry.spans import Spans
from trainer.arguments.checks import megatron_problems, model_problems
from trainer.arguments.rank_settings import note_settings, shared_settings
from trainer.checkpoint.folder import complete_checkpoints, latest_checkpoint, saved_step, step_of
from trainer.compat.cpu_compat import import_megatron
from trainer.launch.launcher import Launcher
from trainer.launch.plan import LAUNCHED, NodeOptions, make_plan
from trainer.launch.rendezvous import tell_others
from trainer.model.determinism import make_deterministic
from trainer.session.broker_session import BrokerSession
from trainer.session.replay import NoPublication, ReplaySource, ReplayStart
from trainer.session.stop_request import StopRequest

log = logging.getLogger("trainer")


def launch(resolved: Resolved, node: NodeOptions, arguments: list[str], *, max_restarts: int = 0, debug: bool = False) -> None:
    """Start the ranks of this node and exit with their code; return where this process is itself a rank, or the only one.

    Raises UsageError or ConfigError with everything that is wrong, before any rank starts.
    """
    is_nproc_given = "trainer.nproc_per_node" in resolved.origin
    plan = make_plan(node, resolved.config.trainer.nproc_per_node, os.environ, is_nproc_given=is_nproc_given)
    os.environ.update({**plan.environment, **visible(resolved.config.trainer.gpus)})
    is_launched = LAUNCHED in os.environ
    problems = [] if is_launched else [*start_problems(resolved, plan.world_size)]
    if plan.is_rank or plan.is_alone:
        return raise_all(problems)
    logs.set_up("trainer", debug=debug, run_dir=resolved.run_dir)
    log.info("%s: starting %d of %d ranks", plan.found, plan.ranks_here, plan.world_size)
    if problems and plan.nnodes > 1:
        tell_others(plan, "; ".join(problems))
    raise_all(problems)
    sys.exit(Launcher(plan, arguments, max_restarts).run())


def tell_other_nodes(node: NodeOptions, problem: str) -> None:
    """The launchers of the other nodes hear that the config of this one does not load; they would wait for it."""
    plan = make_plan(node, 1, os.environ, is_nproc_given=False)
    if plan.nnodes > 1 and not plan.is_rank:
        logs.set_up("trainer")
        tell_others(plan, problem)


def start_problems(resolved: Resolved, world_size: int) -> Iterator[str]:
    """What would keep the ranks of this node from training: options, layout, the model folder."""
    weights, insecure = resolved.config.weights, resolved.config.security.insecure
    try:
        check_bind(weights.weights_bind, "weights.weights_bind", has_keys=resolved.keys_path is not None, insecure=insecure)
        resolved.model_dir  # noqa: B018  # raises
    except SlimebusError as bad:
        yield bad.text
        return
    yield from trainer_problems(resolved)
    yield from model_problems(resolved)
    yield from megatron_problems(resolved, world_size)


class Debugging(NamedTuple):
    """How a trainer is looked into. replay: train on the groups of this folder, without a broker. profile: steps that are traced.

    file: the run.yaml, for the command that a dump is replayed with. from_step: where a replay begins.
    """

    replay: Path | None = None
    profile: range | None = None
    file: Path | None = None
    from_step: int = 0


def run_trainer(resolved: Resolved, broker: str | None, debugging: Debugging, *, take_over: bool, debug: bool) -> None:
    """Train until the last step. Raises SlimebusError."""
    logs.set_up("trainer", debug=debug, run_dir=resolved.run_dir)
    stop = StopRequest(resolved.config.trainer.stop_grace_s)
    if "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHED not in os.environ:  # the ranks of a killed torchrun would train on
        end_with_parent(signal.SIGKILL)()
    os.environ.setdefault("OMP_NUM_THREADS", str(resolved.config.trainer.train_threads))
    source: BrokerSession | ReplaySource | None = None
    try:
        with stop.one_rank_says_it():
            if int(os.environ.get("RANK", "0")) == 0:
                replay = debugging.replay
                if replay is None:
                    source = BrokerSession(resolved, broker, take_over=take_over)
                else:
                    source = ReplaySource(replay, resolved, debugging.from_step)
            _train(resolved, source, broker, stop, debugging)
    except KeyboardInterrupt:
        if isinstance(source, BrokerSession) and source.has_trained:
            saved = saved_step(resolved.run_dir / "checkpoints") or 0
            if saved >= resolved.config.rollout.num_rollout:
                log.warning("interrupted after the last step was saved, before the broker said that the run is finished")
            else:
                log.warning("interrupted without saving; the run goes on from step %d, and trains again what came after", saved)
    finally:
        if source is not None:
            source.close()


def _train(
    resolved: Resolved, source: BrokerSession | ReplaySource | None, broker: str | None, stop: StopRequest, debugging: Debugging
) -> None:
    log.info("loads megatron-core and its model, %s", resolved.model_dir)
    make_deterministic(resolved.config.megatron)
    import_megatron()
    import torch

    from trainer.checkpoint.schedule import CheckpointSchedule
    from trainer.loop import train
    from trainer.model.kernels import kernels_in_use
    from trainer.model.policy import Policy
    from trainer.objective.build_objective import algorithm_problems
    from trainer.publish.publication import Publication
    from trainer.watch.step_watch import StepWatch

    raise_all(algorithm_problems(resolved))
    torch.set_num_threads(resolved.config.trainer.train_threads)
    policy = Policy.build(resolved.config, str(resolved.model_dir), resolved.base)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        if debugging.replay is None:
            settings = shared_settings(resolved.config, resolved.base, resolved.model_dir)
            note_settings(resolved.run_dir, settings, is_resumed=bool(complete_checkpoints(resolved.run_dir / "checkpoints")))
        log.info("trains %s", kernels_in_use(policy.model))
    is_replay = debugging.replay is not None
    folder, process = resolved.run_dir / ("replay" if is_replay else "metrics"), f"trainer-{rank}" if rank else "trainer"
    spans = Spans(folder, process, run=resolved.config.name, counts_cpu=True)
    watch = StepWatch(resolved, debugging.file, policy, profile=debugging.profile, is_dumping=not is_replay)
    publication: Publication | NoPublication = NoPublication()
    try:
        if debugging.replay is not None:
            replayed = source if isinstance(source, ReplaySource) else None
            train(policy, source, publication, ReplayStart(resolved, debugging.replay, replayed), watch, resolved.config, spans, stop)
            return
        session = source if isinstance(source, BrokerSession) else None
        if session:
            session.client.on_clock = spans.compare_clock
            stop.is_broker_silent = lambda: session.client.silent_s >= SILENT_S
        publication = Publication(resolved, policy, session.client if session else None, spans, broker)
        checkpoints = CheckpointSchedule(resolved, session.confirm if session else lambda: None)
        train(policy, session, publication, checkpoints, watch, resolved.config, spans, stop)
    finally:
        publication.close()
        policy.close()


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
