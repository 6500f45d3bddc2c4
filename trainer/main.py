"""The process around the loop: ranks, logs, signals, the connection to the broker."""

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from slimebus.bus.errors import SlimebusError
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
from trainer.checkpoint.folder import complete_checkpoints, saved_step
from trainer.compat.cpu_compat import import_megatron
from trainer.launch.launcher import Launcher, tell_others
from trainer.launch.plan import LAUNCHED, NodeOptions, make_plan
from trainer.session.broker_session import BrokerSession
from trainer.session.replay import NoPublication, ReplaySource, ReplayStart
from trainer.session.stop_request import StopRequest

if TYPE_CHECKING:
    from trainer.critic.session import CriticSession
    from trainer.model.policy import Policy

log = logging.getLogger("trainer")

Source = TypeVar("Source", "BrokerSession", "ReplaySource", "CriticSession")
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""Variables that torch, cuBLAS, NCCL and Transformer Engine document."""


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


@contextlib.contextmanager
def rank_process(
    resolved: Resolved, role: str, connect: Callable[[], Source], stop: StopRequest, *, folder: str = "metrics", debug: bool = False
) -> Iterator[tuple[Source | None, Spans]]:
    """Around the work of a rank: its log, the connection of rank 0 (None elsewhere), megatron-core, its spans in RUN_DIR/folder. An error
    of all ranks is printed once."""
    logs.set_up(role, debug=debug, run_dir=resolved.run_dir)
    if "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHED not in os.environ:  # the ranks of a killed torchrun would train on
        end_with_parent(signal.SIGKILL)()
    os.environ.setdefault("OMP_NUM_THREADS", str(resolved.config.trainer.train_threads))
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # of CUDA's memory: rows are of ever new lengths
    rank, model_dir, source = int(os.environ.get("RANK", "0")), resolved.model_dir, None
    try:
        with stop.one_rank_says_it():
            source = None if rank else connect()
            log.info("loads megatron-core and its model, %s", model_dir)
            make_deterministic(resolved.config.megatron)
            import_megatron()
            import torch

            torch.set_num_threads(resolved.config.trainer.train_threads)
            spans = Spans(resolved.run_dir / folder, f"{role}-{rank}" if rank else role, run=resolved.config.name, counts_cpu=True)
            if client := getattr(source, "client", None):
                client.on_clock, stop.is_broker_silent = spans.compare_clock, lambda: client.silent_s >= SILENT_S
            yield source, spans
    finally:
        if source is not None:
            source.close()


def make_deterministic(megatron: Mapping[str, Any]) -> None:
    """Have torch use deterministic kernels only, where megatron.deterministic_mode asks for it; one that has none raises. Before CUDA is
    initialised. On CPUs the same batches give the same bits without it, with as many ranks and threads.
    """
    if not megatron.get("deterministic_mode"):
        return
    import torch

    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def run_trainer(resolved: Resolved, broker: str | None, debugging: Debugging, *, take_over: bool, debug: bool) -> None:
    """Train until the last step. Raises SlimebusError."""
    stop = StopRequest(resolved.config.trainer.stop_grace_s)
    if debugging.replay is not None:
        source = functools.partial(ReplaySource, debugging.replay, resolved, debugging.from_step)
        with contextlib.suppress(KeyboardInterrupt), rank_process(resolved, "trainer", source, stop, folder="replay", debug=debug) as rank:
            _replay(resolved, debugging, *rank, stop)
        return
    connect, session = functools.partial(BrokerSession, resolved, broker, take_over=take_over), None
    try:
        with rank_process(resolved, "trainer", connect, stop, debug=debug) as (session, spans):
            _train(resolved, broker, debugging, session, spans, stop)
    except KeyboardInterrupt:
        if session is None or not session.has_trained:
            return
        saved = saved_step(resolved.run_dir / "checkpoints") or 0
        if saved >= resolved.config.rollout.num_rollout:
            log.warning("interrupted after the last step was saved, before the broker said that the run is finished")
        else:
            log.warning("interrupted without saving; the run goes on from step %d, and trains again what came after", saved)


def _build_policy(resolved: Resolved, *, is_noted: bool) -> "Policy":
    from trainer.model.gpt import kernels_in_use
    from trainer.model.policy import Policy
    from trainer.objective.build_objective import algorithm_problems

    raise_all(algorithm_problems(resolved))
    policy = Policy.build(resolved.config, str(resolved.model_dir), resolved.base)
    if int(os.environ.get("RANK", "0")) == 0:
        if is_noted:
            settings = shared_settings(resolved.config, resolved.base, resolved.model_dir)
            note_settings(resolved.run_dir, settings, is_resumed=bool(complete_checkpoints(resolved.run_dir / "checkpoints")))
        log.info("trains %s", kernels_in_use(policy.model))
    return policy


def _replay(resolved: Resolved, debugging: Debugging, source: ReplaySource | None, spans: Spans, stop: StopRequest) -> None:
    from trainer.loop import train
    from trainer.watch.step_watch import StepWatch

    assert debugging.replay is not None  # asked by the caller
    with contextlib.closing(_build_policy(resolved, is_noted=False)) as policy:
        watch = StepWatch(resolved, debugging.file, policy, profile=debugging.profile, is_dumping=False)
        start = ReplayStart(resolved, debugging.replay, source)
        train(policy, source, NoPublication(), start, watch, resolved.config, spans, stop)


def _train(
    resolved: Resolved, broker: str | None, debugging: Debugging, session: BrokerSession | None, spans: Spans, stop: StopRequest
) -> None:
    from trainer.checkpoint.schedule import CheckpointSchedule
    from trainer.loop import train
    from trainer.publish.publication import Publication
    from trainer.watch.step_watch import StepWatch

    with contextlib.closing(_build_policy(resolved, is_noted=True)) as policy:
        watch = StepWatch(resolved, debugging.file, policy, profile=debugging.profile)
        with contextlib.closing(Publication(resolved, policy, session.client if session else None, spans, broker)) as publication:
            checkpoints = CheckpointSchedule(resolved, session.confirm if session else lambda: None)
            train(policy, session, publication, checkpoints, watch, resolved.config, spans, stop)


def run_critic(resolved: Resolved, broker: str | None, *, take_over: bool, debug: bool) -> None:
    """Give values and learn until the run is over. Raises SlimebusError."""
    from trainer.critic.session import CriticSession

    stop = StopRequest(resolved.config.trainer.stop_grace_s)
    connect = functools.partial(CriticSession, resolved, broker, take_over=take_over)
    try:
        with rank_process(resolved, "critic", connect, stop, debug=debug) as (session, spans):
            from trainer.checkpoint.schedule import CheckpointSchedule
            from trainer.critic.critic import Critic
            from trainer.critic.loop import run_critic_loop

            with contextlib.closing(Critic.build(resolved.config, str(resolved.model_dir), resolved.base)) as critic:
                checkpoints = CheckpointSchedule(resolved, session.confirm if session else lambda: None, resolved.run_dir / "critic")
                run_critic_loop(critic, session, checkpoints, critic.config, spans, stop)
    except KeyboardInterrupt:
        log.warning("interrupted without saving; what came after the newest checkpoint is read and learned again")
