"""Commands to a worker while it works: attach an engine, detach one, drain. Each is done once, however often it comes."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from rollout.engines.pool import EnginePool
from slimebus.bus.errors import SlimebusError, UsageError
from slimebus.bus.messages import Command, CommandReply
from slimebus.process.hooks import text_of

log = logging.getLogger("rollout")

MAX_KEPT = 64


class Commands:
    """Does commands in the background. outcomes: of those done, by key. pool: None for a worker without engines."""

    def __init__(self, pool: EnginePool | None, *, drain: Callable[[], None], on_outcome: Callable[[], None]) -> None:
        self.pool, self.drain, self.on_outcome = pool, drain, on_outcome
        self.outcomes: dict[str, CommandReply] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def take(self, commands: Sequence[Command]) -> None:
        """Begin those that are new."""
        for command in commands:
            if command.key not in self._running and command.key not in self.outcomes:
                self._running[command.key] = asyncio.create_task(self._do(command))

    async def _do(self, command: Command) -> None:
        try:
            outcome = CommandReply(done=True, text=await self._result_of(command))
        except SlimebusError as bad:
            outcome = CommandReply(done=True, failed=True, text=bad.text)
        except Exception as bad:  # noqa: BLE001  the command is answered, for any error of an engine
            outcome = CommandReply(done=True, failed=True, text=text_of(bad))
        finally:
            del self._running[command.key]
        log.log(logging.WARNING if outcome.failed else logging.INFO, "%s: %s", command.action, outcome.text)
        self.outcomes = dict(list({**self.outcomes, command.key: outcome}.items())[-MAX_KEPT:])
        self.on_outcome()

    async def _result_of(self, command: Command) -> str:
        if command.action == "drain":
            self.drain()
            return "it leaves"
        if self.pool is None:
            raise UsageError("this worker has no engines (engine.engine: none)")
        return await (self.pool.attach if command.action == "attach" else self.pool.detach)(command.url)

    def cancel(self) -> None:
        """Leave what is being done."""
        for task in self._running.values():
            task.cancel()
