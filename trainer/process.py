"""The process around the loop: ranks, logs, signals, the connection to the broker."""

import logging
import os
import signal
import sys
from pathlib import Path

from slimebus import joining, logs
from slimebus.config import Resolved
from slimebus.errors import UsageError
from slimebus.launch import end_with_parent, interrupt_on_sigterm
from slimebus.messages import Heartbeat
from slimebus.security.exposure import check_bind
from slimebus.spans import Spans
from slimebus.transport.client import Client
from trainer.settings import TrainerSettings, settings_of, trains_without_advantage

log = logging.getLogger("trainer")


def launch_ranks(resolved: Resolved, arguments: list[str]) -> bool:
    """Become torchrun when more than one rank is wanted and we are not one of them; does not return then."""
    ranks = resolved.config.trainer.nproc_per_node
    if ranks == 1 or "RANK" in os.environ:
        return False
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "slimebus", *arguments]
    os.execv(sys.executable, command)


def run_trainer(resolved: Resolved, broker: str | None, *, debug: bool) -> None:
    """Train until the last step. Raises SlimebusError."""
    logs.set_up("trainer", debug=debug)
    interrupt_on_sigterm()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the ranks of a killed torchrun would train on
        end_with_parent(signal.SIGKILL)
    os.environ.setdefault("OMP_NUM_THREADS", str(resolved.config.trainer.train_threads))
    settings = settings_of(resolved)
    check_bind(
        *(resolved.config.weights.weights_bind, "weights.weights_bind"),
        has_keys=resolved.keys_path is not None,
        insecure=resolved.config.security.insecure,
    )
    client = welcome = None
    if int(os.environ.get("RANK", "0")) == 0:
        client = joining.client_of(resolved, broker, role="trainer", name="trainer")
        welcome = joining.join(client, "trainer", resolved.config.broker.connect_timeout_s)
        # A model may take minutes to load: until the bus takes over, the broker hears that this process lives.
        client.keep_alive(
            welcome.heartbeat_s, lambda: Heartbeat(state="loading"), lambda reply: None, lambda problem: log.error("%s", problem.text)
        )
    try:
        _train(resolved, settings, client, welcome, broker)
    except KeyboardInterrupt:
        log.info("interrupted; the newest checkpoint is where it goes on")
    finally:
        if client is not None:
            client.close()


def _train(resolved: Resolved, settings: TrainerSettings, client: "Client | None", welcome: "object", broker: str | None) -> None:
    import torch

    from slimebus.messages import Welcome
    from trainer.bus import Bus
    from trainer.checkpoints import Checkpoints
    from trainer.loop import train
    from trainer.policy import Policy
    from trainer.publishing import Publishing

    torch.set_num_threads(resolved.config.trainer.train_threads)
    policy = Policy.build(settings)
    rank = int(os.environ.get("RANK", "0"))
    spans = Spans(resolved.run_dir / "metrics", f"trainer-{rank}" if rank else "trainer", counts_cpu=True)
    bus, publishing = None, Publishing(resolved, policy, client, spans, broker)
    try:
        if client is not None and isinstance(welcome, Welcome):
            bus = Bus(resolved, client, welcome, trains_without_advantage=trains_without_advantage(settings.algorithm))
        train(policy, bus, publishing, Checkpoints(resolved), resolved.config, spans)
    finally:
        publishing.close()
        if bus is not None:
            bus.close()
        policy.close()


def export_checkpoint(resolved: Resolved, out: Path) -> int | None:
    """Write the newest checkpoint to `out` in Hugging Face layout; the number of steps it has trained, on rank 0 alone."""
    from trainer.checkpoint_folder import latest_checkpoint
    from trainer.policy import Policy

    directory = resolved.run_dir / "checkpoints"
    if latest_checkpoint(str(directory)) is None:
        raise UsageError(f"{directory}: no checkpoint; has the run saved one (trainer.save_interval)?")
    policy = Policy.build(settings_of(resolved))
    try:
        step, _ = policy.load_checkpoint(str(directory))
        policy.save_hf(str(out))
        return step if policy.is_main else None
    finally:
        policy.close()
