"""The process around the critic's loop: ranks, logs, signals, the connection to the broker."""

import logging
import os

from slimebus.bus.transport.request import SILENT_S
from slimebus.config import Resolved
from slimebus.telemetry import logs
from slimebus.telemetry.spans import Spans
from trainer.compat.cpu_compat import import_megatron
from trainer.critic.session import CriticSession
from trainer.model.determinism import make_deterministic
from trainer.session.stop_request import StopRequest

log = logging.getLogger("critic")


def run_critic(resolved: Resolved, broker: str | None, *, take_over: bool, debug: bool) -> None:
    """Give values and learn until the run is over. Raises SlimebusError."""
    logs.set_up("critic", debug=debug, run_dir=resolved.run_dir)
    stop = StopRequest(resolved.config.trainer.stop_grace_s)
    os.environ.setdefault("OMP_NUM_THREADS", str(resolved.config.trainer.train_threads))
    session, model_dir = None, str(resolved.model_dir)
    try:
        with stop.one_rank_says_it():
            if int(os.environ.get("RANK", "0")) == 0:
                session = CriticSession(resolved, broker, take_over=take_over)
                stop.is_broker_silent = lambda: session.consumer.client.silent_s >= SILENT_S
            _run(resolved, model_dir, session, stop)
    except KeyboardInterrupt:
        log.warning("interrupted without saving; what came after the newest checkpoint is read and learned again")
    finally:
        if session is not None:
            session.close()


def _run(resolved: Resolved, model_dir: str, session: CriticSession | None, stop: StopRequest) -> None:
    make_deterministic(resolved.config.megatron)
    import_megatron()
    import torch

    from trainer.checkpoint.schedule import CheckpointSchedule
    from trainer.critic.critic import Critic
    from trainer.critic.loop import run

    torch.set_num_threads(resolved.config.trainer.train_threads)
    critic = Critic.build(resolved.config, model_dir, resolved.base)
    rank = int(os.environ.get("RANK", "0"))
    spans = Spans(resolved.run_dir / "metrics", f"critic-{rank}" if rank else "critic", run=resolved.config.name, counts_cpu=True)
    if session:
        session.consumer.client.on_clock = spans.compare_clock
    confirm = session.confirm if session else lambda: None
    checkpoints = CheckpointSchedule(resolved, confirm, resolved.run_dir / "critic")
    try:
        run(critic, session, checkpoints, critic.config, spans, stop)
    finally:
        critic.close()
