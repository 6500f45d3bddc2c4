"""A user's stateful source: what it gives, what it hears and what it must remember, as the state machine wants it.

    take -> save -> (the prompt and the state in one transaction)
    feedback* -> save -> (what happened and the state in one transaction)

A broker that is killed goes on with the state of the last transaction: the source gives neither a prompt that was lost with the rest nor
one twice, and knows exactly the feedback about what the broker knows to have happened.
"""

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from broker.source.file_rows import FileRows
from broker.state.prompt_source import GroupResult, Prompt, PromptSource
from slimebus.bus.errors import DataError, HookError, SlimebusError
from slimebus.hooks import hooks
from slimebus.prompts.prompt_record import PromptKeys, plain, record_of

log = logging.getLogger("broker")

SLOW_S = 0.1
"""The broker answers nobody while a plug-in works, and leases expire when that takes long; longer than this is logged."""
METHODS = ("take", "save", "load", "feedback")
ARGUMENTS = ("rows", "seed")
MAX_STATE_BYTES = 64 * 1024 * 1024
KEYS = PromptKeys(tools="tools")


class PromptMaps(Sequence[dict[str, Any]]):
    """The prompts of data.prompt_data as maps {prompt, label, metadata}, read when they are asked for."""

    def __init__(self, rows: FileRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        """One prompt, or those of a slice. Raises IndexError; DataError when the file changed."""
        chosen = range(len(self))[row]
        return [self[i] for i in chosen] if isinstance(chosen, range) else msgspec.msgpack.decode(self._rows.record(chosen))


class HookSource(PromptSource):
    """Prompts `hook/0`, `hook/1`, ... of a hook. `record_of` finds the record of a prompt that was given before this process began.

    A take that fails is counted, and the hook goes back to the state it last saved: the run waits and asks again. A feedback that
    fails is counted and logged, and the run goes on. Raises HookError when the hook is not one.
    """

    def __init__(self, path: str, hook: Any, *, fingerprint: str = "") -> None:
        self.path, self._hook = path, hook
        self.record_of: Callable[[str], bytes | None] = lambda prompt_id: None
        self.fingerprint = f"source hook {path}{f' over {fingerprint}' if fingerprint else ''}"
        self._failures, self._last_failure = 0, ""
        missing = [name for name in METHODS if not callable(getattr(hook, name, None))]
        if missing:
            raise HookError(f"source hook {path}: it has no {missing[0]}(); expected an object with {', '.join(METHODS)}")
        self._kept: bytes | None = None
        self._journal: list[GroupResult | None] = []
        """What happened since `_state` was encoded: feedback, or None for a take."""
        self._encode()
        self._is_first_take = True
        self._metadata: dict[str, Any] = {}

    # --- prompts ---

    def take(self, position: int) -> Prompt | None:
        """The next prompt of the hook, None when it has none now. Raises HookError; then the hook is as before."""
        try:
            made = self._call("take")
            record = None if made is None else self._record(made)
            if self._is_first_take:
                self._encode()  # so that a state that cannot be saved is found before prompts are given
            else:
                self._journal.append(None)
        except HookError:
            self._go_back()
            raise
        self._is_first_take = False
        if record is None:
            return None
        prompt = Prompt(id=f"hook/{position}", position=position, record=record)
        self._metadata[prompt.id] = msgspec.msgpack.decode(record)["metadata"]
        return prompt

    def _record(self, made: Any) -> bytes:
        if not isinstance(made, dict):
            raise self._failed(f"take gave {type(made).__name__}; expected a map with a 'prompt', or None")
        try:
            return record_of(made, KEYS)
        except DataError as bad:
            raise self._failed(f"take gave no prompt: {bad.text}") from None
        except Exception as bad:  # a map of the hook's own class may fail in any way
            raise self._failed(f"take gave a map that cannot be read: {type(bad).__name__}: {hooks.text_of(bad)}") from bad

    # --- feedback ---

    def feedback(self, result: GroupResult) -> None:
        """Hand the result to the hook, with the metadata of its prompt."""
        metadata = self._metadata_of(result.id)
        if result.outcome == "requeued":
            self._metadata[result.id] = metadata
        result = msgspec.structs.replace(result, metadata=metadata)
        self._journal.append(result)
        self._feedback(result)

    def _feedback(self, result: GroupResult) -> None:
        try:
            self._call("feedback", result)
        except HookError as bad:
            log.error("group %s: %s", result.id, bad.text)

    def _metadata_of(self, prompt_id: str) -> Any:
        if prompt_id in self._metadata:
            return self._metadata.pop(prompt_id)
        try:
            record = self.record_of(prompt_id)
            return {} if record is None else msgspec.msgpack.decode(record, type=dict[str, Any]).get("metadata", {})
        except (SlimebusError, msgspec.DecodeError) as bad:
            log.error("group %s: its metadata is lost: %s", prompt_id, bad)
            return {}

    # --- state ---

    def restore(self, state: bytes) -> None:
        """Hand the hook the state that it saved. Raises HookError."""
        self._call("load", msgspec.msgpack.decode(state))
        self._state = self._kept = state
        self._journal.clear()

    def saved(self) -> bytes | None:
        """The state to keep, None when it is as it was. Encoded here, once for all takes and feedback since the last call."""
        self._is_first_take = True
        if self._journal:
            try:
                self._encode()
            except HookError as bad:
                log.error("%s; its last good state is kept", bad.text)
        if self._state == self._kept:
            return None
        self._kept = self._state
        return self._state

    def report(self) -> dict[str, Any]:
        """How often the hook failed, for the status."""
        failures = {"failures": self._failures, "last_failure": self._last_failure} if self._failures else {}
        return {"hook": self.path, **failures}

    def _encode(self) -> None:
        state = self._call("save")
        if not isinstance(state, dict):
            raise self._failed(f"save gave {type(state).__name__}; expected a map")
        try:
            encoded = msgspec.msgpack.encode(state, enc_hook=plain)
            msgspec.msgpack.decode(encoded)
        except Exception as bad:  # a map of the hook's own class may fail in any way
            raise self._failed(f"save gave what cannot be kept: {hooks.text_of(bad)}; expected maps, lists, text, numbers") from bad
        if len(encoded) > MAX_STATE_BYTES:
            raise self._failed(f"save gave {len(encoded)} bytes; at most {MAX_STATE_BYTES}")
        self._state = encoded
        self._journal.clear()

    def _go_back(self) -> None:
        """Load the last encoded state, then repeat what was taken and told since."""
        try:
            self._call("load", msgspec.msgpack.decode(self._state))
            for result in self._journal:
                if result is None:
                    self._call("take")
                else:
                    self._feedback(result)
        except HookError as bad:
            log.error("%s; the source cannot go back to where it was and goes on from here", bad.text)

    def _call(self, method: str, *given: Any) -> Any:
        try:
            return call_plugin(f"source hook {self.path}: {method}", getattr(self._hook, method), *given)
        except HookError as bad:
            raise self._failed(bad.text.removeprefix(f"source hook {self.path}: ")) from bad.__cause__

    def _failed(self, text: str) -> HookError:
        """The error that says so, counted."""
        self._failures, self._last_failure = self._failures + 1, text[:500]
        return HookError(f"source hook {self.path}: {text}")


def load_source(path: str, *, base: Path, seed: int, rows: FileRows | None) -> HookSource:
    """The source that the hook at `path` makes: a class or function, called with those of `rows` and `seed` that it takes.

    Raises HookError when it cannot be made.
    """
    factory, name = hooks.load(path, base=base), f"source hook {path}"
    offered = {"rows": PromptMaps(rows) if rows is not None else [], "seed": seed}
    taken = call_plugin(name, inspect.signature, factory).parameters
    unknown = [argument for argument in taken if argument not in ARGUMENTS]
    if unknown:
        raise HookError(f"{name}: unknown argument {unknown[0]!r}; it may take {', '.join(ARGUMENTS)}")
    hook = call_plugin(name, lambda: factory(**{argument: offered[argument] for argument in taken}))
    return HookSource(path, hook, fingerprint=rows.fingerprint if rows is not None else "")


def call_plugin(name: str, plugin: Callable[..., Any], *given: Any) -> Any:
    """What the plug-in returns. Raises HookError with its name for anything it raises, SystemExit too."""
    started = time.monotonic()
    try:
        answer = plugin(*given)
    except BaseException as bad:  # signals set a flag in the broker: none of these is a Ctrl-C
        raise HookError(f"{name} failed: {type(bad).__name__}: {hooks.text_of(bad)}") from bad
    if (took := time.monotonic() - started) > SLOW_S:
        log.warning("%s took %.2f s; the broker answers nobody meanwhile", name, took)
    return answer
