"""Calls of plug-ins (hooks, rewards, filters, chat templates): all that one raises is a PluginError that names it and the user's own line.

    coroutine function --> a task of the event loop          plain function --> a thread of its own

Neither can end the worker: SystemExit, KeyboardInterrupt and a CancelledError of the plug-in's own making are errors like any other.
"""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from typing import Any

from slimebus.bus.errors import HookError
from slimebus.bus.messages import LeasedGroup
from slimebus.config import Resolved
from slimebus.hooks import hooks
from slimebus.hooks.hooks import text_of, user_line
from slimebus.process.process_guard import can_hide

CANCEL_S = 6.0
"""How long a cancelled plug-in may clean up; then it is left behind."""

LEASED: ContextVar[LeasedGroup | None] = ContextVar("leased", default=None)
"""The group that a task works for, and all tasks that it begins."""
CALLED: ContextVar[str] = ContextVar("called", default="")
"""The same of the plug-in."""
HIDDEN: ContextVar[tuple[Path, ...]] = ContextVar("hidden", default=())
"""Folders that programs of agents and tools do not see."""


class PluginError(HookError):
    """A plug-in raised or gave something that cannot be used. alike: the same for failures of the same kind at the same line."""

    def __init__(self, alike: str, detail: str = "") -> None:
        super().__init__(f"{alike}: {detail}" if detail else alike)
        self.alike, self.detail = alike, detail


class Plugin:
    """A loaded plug-in. name: what it is and its import path, as in `reward mine.py:score`."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        call = getattr(function, "__call__", None)  # noqa: B004  an object may have a coroutine function for it
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    @classmethod
    def load(cls, kind: str, path: str, base: Path | None, arguments: Sequence[str] = ()) -> "Plugin":
        """The plug-in at this import path. Raises HookError, also when it cannot be called with so many positional arguments."""
        return cls(f"{kind} {path}", hooks.load(path, base=base, arguments=arguments))

    def signature(self) -> inspect.Signature | None:
        """What it may be called with; None where Python cannot tell (some builtins)."""
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError):
            return None

    async def __call__(
        self, *arguments: Any, named: Mapping[str, Any] | None = None, timeout_s: float | None = None, limit: str = "reward_timeout_s",
        passes: Sequence[BaseException] = (),
    ) -> Any:  # fmt: skip
        """What the plug-in gives for these and the named arguments. limit: what timeout_s is called.

        Raises PluginError, also after timeout_s, or one of the errors in `passes`, a list that may grow meanwhile.
        """
        task = asyncio.ensure_future(self._outcome(arguments, named or {}))
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            if not task.done():
                raise PluginError(f"{self.name} took longer than {limit} = {timeout_s:g} s")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_S)
        value, error = task.result()
        if error is None:
            return value
        if any(error is one for one in passes):
            raise error
        raise failure(self.name, error, self.function)

    async def _outcome(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
        CALLED.set(self.name)
        try:
            call = self.function if self.is_async else self._in_thread
            value = call(*arguments, **named)
            while inspect.isawaitable(value):
                value = await value
            return value, None
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None, error

    async def _in_thread(self, *arguments: Any, **named: Any) -> Any:
        """A daemon thread for the call, and no executor's: one that never returns keeps no other work waiting, and no process alive."""
        future: Future[tuple[Any, BaseException | None]] = Future()

        def run() -> None:
            future.set_running_or_notify_cancel()
            try:
                future.set_result((self.function(*arguments, **named), None))
            except BaseException as error:  # noqa: BLE001  carried to the caller
                future.set_result((None, error))

        threading.Thread(target=run, name=self.name, daemon=True).start()
        value, error = await asyncio.wrap_future(future)
        if error is not None:
            raise error
        return value


def failure(name: str, error: BaseException, function: Callable[..., Any] | None = None) -> PluginError:
    """What this exception says of what `name` names: the user's line, the type, the text."""
    if isinstance(error.__cause__, StopIteration | StopAsyncIteration):  # Python makes it a RuntimeError at the end of a coroutine
        error = error.__cause__
    where = _line_of(error, function)
    return PluginError(f"{name} failed{f' at {where}' if where else ''}: {type(error).__name__}", text_of(error))


def _line_of(error: BaseException, function: Callable[..., Any] | None) -> str:
    """`FILE:LINE` of the user's where this was raised. Without a function code that was compiled from a text counts, such as a template."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return user_line(frames, own=code.co_filename if code is not None else "", not_a_file="<frozen" if function is None else "<")


class ContainedTask(asyncio.Task[Any]):
    """A task that its own SystemExit or KeyboardInterrupt ends, and not the process. Its context can be read from other threads."""

    def __init__(self, work: Awaitable[Any], *, context: Context | None = None, **named: Any) -> None:
        self.context = copy_context() if context is None else context
        super().__init__(_contained(work), context=self.context, **named)


def contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """From now on the tasks of this loop are contained."""
    loop.set_task_factory(lambda loop, work, **named: ContainedTask(work, loop=loop, **named))


def called_in(loop: asyncio.AbstractEventLoop) -> tuple[str, LeasedGroup | None]:
    """The plug-in that a loop, which may be another thread's, is in, and the group that this is for; of neither may be known."""
    task = asyncio.current_task(loop)
    return (task.context.get(CALLED, ""), task.context.get(LEASED)) if isinstance(task, ContainedTask) else ("", None)


def hide_from_programs(resolved: Resolved) -> None:
    """What this task begins from now on starts programs that see neither the run's folder nor its keys, where the kernel lets us."""
    given, needed = [resolved.run_dir, *filter(None, [resolved.keys_path])], (resolved.base.resolve(), Path.cwd())
    folders = [(place if place.is_dir() else place.parent).resolve() for place in given if place.exists()]
    HIDDEN.set(tuple(one for one in folders if can_hide() and not any(place.is_relative_to(one) for place in needed)))


async def _contained(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__} in a task: {text_of(error)}") from error
