"""The process around a worker: logs, signals, the connection to the broker."""

import logging

import uvloop

from rollout.samples.tokenizer import Tokenizer
from rollout.worker.worker import Worker
from slimebus.bus.messages import Welcome
from slimebus.bus.transport.client import Client
from slimebus.client import connect
from slimebus.config import Resolved
from slimebus.config.file_checks import worker_problems
from slimebus.config.load import raise_all
from slimebus.process.launch import interrupt_on_sigterm
from slimebus.security.exposure import check_bind
from slimebus.telemetry import logs

log = logging.getLogger("rollout")


def run_worker(resolved: Resolved, broker: str | None, name: str | None, *, take_over: bool, debug: bool) -> None:
    """Run one worker until the run is finished or a signal ends it. Raises SlimebusError."""
    logs.set_up("rollout", debug=debug, run_dir=resolved.run_dir)
    interrupt_on_sigterm()
    raise_all(worker_problems(resolved))
    if bind := resolved.config.weights.fanout_bind:
        check_bind(bind, "weights.fanout_bind", has_keys=resolved.keys_path is not None, insecure=resolved.config.security.insecure)
    client = connect.client_of(resolved, broker, role="rollout", name=name or connect.process_name("worker"))
    client.rejoins = True
    try:
        # Both may take long and are done before there is a loop: here a signal ends them at once, and there is nothing to give back.
        welcome = connect.join(client, "rollout", resolved.config.broker.connect_timeout_s, take_over=take_over)
        connect.report_starting(client, welcome, "loads its tokenizer")
        data = resolved.config.data
        kwargs = data.apply_chat_template_kwargs
        tokenizer = Tokenizer(resolved.model_dir, apply_chat_template=data.apply_chat_template, template_kwargs=kwargs)
        uvloop.run(_run(resolved, client, welcome, tokenizer))
    except KeyboardInterrupt:
        log.info("interrupted")
    finally:
        client.close()


async def _run(resolved: Resolved, client: Client, welcome: Welcome, tokenizer: Tokenizer) -> None:
    worker = Worker(resolved, client, name=client.name)
    worker.watch.start()
    await worker.run(welcome, tokenizer)
    worker.watch.exit_code = 0  # all that is left to do is to end
