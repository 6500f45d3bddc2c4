"""A user's stateful source: what it gives, what it is told and what it must remember, as the state machine wants it.

    take -> save -> (the prompt and the state in one transaction)
    feedback* -> save -> (what happened and the state in one transaction)

A broker that is killed goes on with the state of the last transaction: the source gives neither a prompt that was lost with the rest nor
one twice, and knows exactly the feedback about what the broker knows to have happened.
"""

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec

from broker.source.rows import FileRows
from broker.state.table import GroupResult, Prompt
from slimebus import hooks
from slimebus.errors import DataError, HookError, SlimebusError
from slimebus.prompt_record import PromptKeys, check_fields, record_of

log = logging.getLogger("broker")

METHODS = ("take", "save", "load", "feedback")
ARGUMENTS = ("rows", "seed")
MAX_STATE_BYTES = 64 * 1024 * 1024
SLOW_S = 0.1
"""The broker answers nobody while the hook works; leases expire when that takes long."""
KEYS = PromptKeys(tools="tools")


class PromptMaps(Sequence[dict[str, Any]]):
    """The prompts of data.prompt_data as maps {prompt, label, metadata}, read when they are asked for."""

    def __init__(self, rows: FileRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, row: int | slice) -> Any:
        """One prompt, or those of a slice. Raises IndexError; DataError when the file changed."""
        chosen = range(len(self))[row]
        return [self[i] for i in chosen] if isinstance(chosen, range) else msgspec.msgpack.decode(self._rows.record(chosen))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))


class HookSource:
    """Prompts `hook/0`, `hook/1`, ... of a hook. `record_of` finds the record of a prompt that was given before this process began.

    A take that fails is counted, and the hook goes back to the state it last saved: the run waits and asks again. A feedback that
    fails is counted and logged, and the run goes on. Raises HookError when the hook is not one.
    """

    def __init__(self, path: str, hook: Any, *, fingerprint: str = "") -> None:
        self.path = path
        self.record_of: Callable[[str], bytes | None] = _no_record
        self.fingerprint = f"source hook {path}{f' over {fingerprint}' if fingerprint else ''}"
        self._hook = hook
        self._failures, self._last_failure = 0, ""
        self.skipped: list[str] = []
        missing = [name for name in METHODS if not callable(getattr(hook, name, None))]
        if missing:
            raise HookError(f"source hook {path}: it has no {missing[0]}(); expected an object with {', '.join(METHODS)}")
        self._state = self._encoded()
        self._kept: bytes | None = None
        self._is_dirty = True
        self._metadata: dict[str, Any] = {}

    # --- prompts ---

    def take(self, position: int) -> Prompt | None:
        """The next prompt of the hook, None when it has none now. Raises HookError; then the hook is as before."""
        self._keep_feedback()
        try:
            made = self._call("take")
            record = None if made is None else self._record(made)
            self._state = self._encoded()
        except HookError:
            self._go_back()
            raise
        self._is_dirty = True
        if made is None or record is None:
            return None
        prompt = Prompt(id=f"hook/{position}", position=position, record=record)
        self._metadata[prompt.id] = made.get("metadata") or {}
        return prompt

    def find(self, prompt_id: str) -> Prompt | None:
        """None: the records of these prompts are in the store."""
        return None

    def _record(self, made: Any) -> bytes:
        if not isinstance(made, dict):
            raise self._failed(f"take gave {type(made).__name__}; expected a map with a 'prompt', or None")
        try:
            check_fields(made, KEYS)
            return record_of(made, KEYS)
        except DataError as bad:
            raise self._failed(f"take gave no prompt: {bad.text}") from None

    # --- feedback ---

    def tell(self, result: GroupResult) -> None:
        """Hand the result to the hook, with the metadata of its prompt."""
        metadata = self._metadata_of(result.id)
        if result.outcome == "requeued":
            self._metadata[result.id] = metadata
        self._is_dirty = True
        try:
            self._call("feedback", msgspec.structs.replace(result, metadata=metadata))
        except HookError as bad:
            log.error("group %s: %s", result.id, bad.text)

    def _metadata_of(self, prompt_id: str) -> Any:
        if prompt_id in self._metadata:
            return self._metadata.pop(prompt_id)
        try:
            record = self.record_of(prompt_id)
        except SlimebusError as bad:
            log.error("group %s: its metadata is lost: %s", prompt_id, bad.text)
            return {}
        return msgspec.msgpack.decode(record)["metadata"] if record is not None else {}

    # --- state ---

    def restore(self, state: bytes) -> None:
        """Hand the hook the state that it saved. Raises HookError."""
        self._call("load", msgspec.msgpack.decode(state))
        self._state = self._kept = state
        self._is_dirty = False

    def saved(self) -> bytes | None:
        """The state to keep, None when it is as it was."""
        if not self._is_dirty:
            return None
        self._keep_feedback()
        self._is_dirty = False
        if self._state == self._kept:
            return None
        self._kept = self._state
        return self._state

    def report(self) -> dict[str, Any]:
        """How often the hook failed, for the status."""
        failures = {"failures": self._failures, "last_failure": self._last_failure} if self._failures else {}
        return {"hook": self.path, **failures}

    def _keep_feedback(self) -> None:
        if self._is_dirty:
            try:
                self._state = self._encoded()
            except HookError as bad:
                log.error("%s; its last good state is kept", bad.text)

    def _encoded(self) -> bytes:
        state = self._call("save")
        if not isinstance(state, dict):
            raise self._failed(f"save gave {type(state).__name__}; expected a map")
        try:
            encoded = msgspec.msgpack.encode(state)
            msgspec.msgpack.decode(encoded)
        except (TypeError, ValueError, OverflowError, RecursionError) as bad:
            raise self._failed(f"save gave what cannot be kept: {bad}; expected maps, lists, text, numbers") from None
        if len(encoded) > MAX_STATE_BYTES:
            raise self._failed(f"save gave {len(encoded)} bytes; at most {MAX_STATE_BYTES}")
        return encoded

    def _go_back(self) -> None:
        try:
            self._call("load", msgspec.msgpack.decode(self._state))
        except HookError as bad:
            log.error("%s", bad.text)

    def _call(self, method: str, *given: Any) -> Any:
        start = time.monotonic()
        try:
            answer = getattr(self._hook, method)(*given)
        except Exception as bad:  # a plug-in may fail in any way
            raise self._failed(f"{method} failed: {type(bad).__name__}: {bad}") from bad
        if time.monotonic() - start > SLOW_S:
            log.warning("source hook %s: %s took %.1f s; the broker answers nobody meanwhile", self.path, method, time.monotonic() - start)
        return answer

    def _failed(self, text: str) -> HookError:
        self._failures += 1
        self._last_failure = text[:500]
        return HookError(f"source hook {self.path}: {text}")


def load_source(path: str, *, base: Path, seed: int, rows: FileRows | None) -> HookSource:
    """The source that the hook at `path` makes: a class or function, called with those of `rows` and `seed` that it takes.

    Raises HookError when it cannot be made.
    """
    factory: Callable[..., Any] = hooks.load(path, base=base)
    offered = {"rows": PromptMaps(rows) if rows is not None else [], "seed": seed}
    try:
        unknown = [name for name in inspect.signature(factory).parameters if name not in ARGUMENTS]
        if unknown:
            raise HookError(f"source hook {path}: unknown argument {unknown[0]!r}; it may take {', '.join(ARGUMENTS)}")
        hook = factory(**{name: offered[name] for name in inspect.signature(factory).parameters})
    except HookError:
        raise
    except Exception as bad:  # a plug-in may fail in any way
        raise HookError(f"source hook {path}: {type(bad).__name__}: {bad}") from bad
    return HookSource(path, hook, fingerprint=rows.fingerprint if rows is not None else "")


def _no_record(prompt_id: str) -> bytes | None:
    return None
