"""The process around a worker: logs, signals, the connection to the broker."""

import asyncio
import signal
from functools import partial

import uvloop

from rollout.worker import Worker
from slimebus import joining, logs
from slimebus.config import Resolved
from slimebus.errors import UsageError
from slimebus.messages import Welcome
from slimebus.transport.client import Client


def run_worker(resolved: Resolved, broker: str | None, name: str | None, *, debug: bool) -> None:
    """Run one worker until the run is finished or a signal ends it. Raises SlimebusError."""
    logs.set_up("rollout", debug=debug)
    model_dir = resolved.path(resolved.config.model.hf_checkpoint)
    if not resolved.config.model.hf_checkpoint or not model_dir.is_dir():
        raise UsageError(f"model.hf_checkpoint: no directory {model_dir}; give the model in Hugging Face layout")
    uvloop.run(_run(resolved, joining.broker_address(resolved, broker), name or joining.process_name("worker")))


async def _run(resolved: Resolved, address: str, name: str) -> None:
    client = Client(address, name=name)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        worker = Worker(resolved, client, name=name)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, partial(_stop, worker, stop))
        welcome = await _join(client, resolved.config.broker.connect_timeout_s, stop)
        if welcome is not None:
            await worker.run(welcome)
    finally:
        await asyncio.to_thread(client.close)


def _stop(worker: Worker, stop: asyncio.Event) -> None:
    stop.set()
    worker.stop()


async def _join(client: Client, timeout_s: float, stop: asyncio.Event) -> Welcome | None:
    """The broker's welcome, or None when told to stop first."""
    joined = asyncio.ensure_future(asyncio.to_thread(joining.join, client, "rollout", timeout_s))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({joined, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not joined.done():
        await asyncio.to_thread(client.close, goodbye=False)
        return None
    stopped.cancel()
    return joined.result()
