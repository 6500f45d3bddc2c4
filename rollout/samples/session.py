"""A session: the one way to make a sample. It records what the policy sampled and what it was shown, token by token.

    the record    prompt | turn     | observed | turn     |        generate() samples a turn, observe() adds what no policy said
    loss_mask     0 0 0    1 1 1 1    0 0        1 1 1
    versions      -1       7 7 8 8    -1         8 8 8

What the engine is given is the record itself, and what it makes is kept as it came: nothing that was sampled is tokenised again. Chat
messages are turned into tokens only where they are new, behind what is there (rollout/samples/tokenizer.py:encode_turn).

One session is one trajectory: one of a group's n attempts. It is one sample, unless it is branched, or goes on with a context that begins
with no record of it (compacted, or with another system prompt): then the record so far is a sample, and another one begins. Each of them
may go on later: an agent and its sub-agent that speak in turns make two samples.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
import numpy as np

from rollout.samples.partials import Unfinished, join_runs
from rollout.samples.response import Response, Task, logprob_temperature, token_ids
from rollout.samples.tokenizer import Messages, Tokenizer
from slimebus.bus.errors import HookError, SlimebusError, UsageError
from slimebus.bus.messages import NO_VERSION, Scalar

if TYPE_CHECKING:
    from rollout.engines.dispatch import Dispatch

Context = Messages | Sequence[int] | np.ndarray
NONE = np.zeros(0, np.int32)
KEPT = ("prompt_ids", "token_ids", "logprobs", "versions", "loss_mask", "text", "finish_reason", "temperature", "extras")
"""The fields that a response has from its record as they are."""


@dataclass(eq=False)
class _Record:
    """One sample in the making: [P] prompt tokens and [R] after them. messages: what they say, the first num_rendered of them in tokens.

    reply_at: where in [R] the reply begins that is being made; end: its last token, where it ended by itself. is_made: some token is
    trained, or a turn was asked for. num_turns: of the trajectory.
    """

    prompt_ids: np.ndarray
    messages: Messages
    tools: Messages | None = None
    num_rendered: int = 0
    token_ids: np.ndarray = field(default_factory=lambda: NONE)
    logprobs: np.ndarray = field(default_factory=lambda: NONE.astype(np.float32))
    loss_mask: np.ndarray = field(default_factory=lambda: NONE.astype(np.uint8))
    versions: list[tuple[int, int]] = field(default_factory=list)
    reply_at: int = 0
    has_reply: bool = False
    end: int | None = None
    is_made: bool = False
    num_turns: int = 0
    text: str = ""
    finish_reason: str = "stop"
    temperature: float | None = None
    extras: dict[str, np.ndarray] = field(default_factory=dict)

    def append(self, ids: np.ndarray, logprobs: np.ndarray, versions: Sequence[tuple[int, int]], *, is_trained: bool) -> None:
        """Add tokens behind the last."""
        self.token_ids = np.concatenate([self.token_ids, ids]).astype(np.int32)
        self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32)
        self.loss_mask = np.concatenate([self.loss_mask, np.full(len(ids), is_trained, np.uint8)])
        self.versions = join_runs(self.versions, versions)
        self.is_made, self.end = self.is_made or is_trained, None

    def begins(self, context: Messages, tools: Messages | None) -> bool:
        """Whether this context, with these tools, goes on from it."""
        known = self.messages
        return bool(known) and tools == self.tools and len(context) >= len(known) and all(map(_is_same, known, context))

    def branched(self) -> "_Record":
        """The same tokens as context: none of them is trained here."""
        copies = {"messages": [dict(m) for m in self.messages], "versions": list(self.versions), "extras": {}}
        return replace(self, **copies, loss_mask=np.zeros_like(self.loss_mask), is_made=False, temperature=None)  # type: ignore[arg-type]


class Session:
    """One trajectory, as a generate hook sees it (docs/hooks.md). A session makes one turn at a time; `branch` for more at once.

    task: what is to be done. reward: set it, and no reward function is called. metadata: goes with its samples. tools: what the chat
    template is given. max_context_len: most tokens of prompt and turns together; 0: no limit but the engine's.
    """

    def __init__(self, task: Task, engines: "Dispatch | None", tokenizer: Tokenizer, *, max_context_len: int = 0) -> None:
        self.task, self.tokenizer, self.max_context_len = task, tokenizer, max_context_len
        self.id = f"{task.group}.{task.index}"
        self.began_at, self.is_waiting = time.monotonic(), False
        """When the time for sampling began, which it does not while nobody samples: is_waiting."""
        self.engines = engines
        self._is_busy = False
        self.branches: list[Session] = [self]
        """This session and its branches, and theirs."""
        self.turns: list[tuple[float, float]] = []
        """When each turn of this session and its branches began, seconds since the epoch, and how long it took."""
        self.errors: list[BaseException] = []
        """Those of the engines that came through the hook, which are not the hook's own."""
        self.restart()

    def restart(self) -> None:
        """Begin again at the task: nothing that was made, observed or set is left."""
        task, tools = self.task, self.task.metadata.get("tools")
        self.reward: float | None = None
        self.metadata: dict[str, Scalar] = {}
        self.tools: Messages | None = tools if isinstance(tools, list) and tools else None
        messages = [dict(message) for message in task.prompt] if isinstance(task.prompt, list) else []
        self._record = _Record(np.array(task.prompt_ids), messages, self.tools, len(messages))
        self._closed: list[_Record] = []

    # --- what is there ---

    @property
    def messages(self) -> Messages:
        """The conversation so far, replies as decoded; empty where the prompt is text. An entry may be replaced, by a parsed call, say."""
        return self._record.messages

    @property
    def token_ids(self) -> np.ndarray:
        """The record: prompt and all that followed, int32 [T], without messages that no turn has seen yet."""
        return np.concatenate([self._record.prompt_ids, self._record.token_ids]).astype(np.int32)

    @property
    def text(self) -> str:
        """The last turn, without the end token."""
        return self._record.text

    @property
    def extras(self) -> dict[str, np.ndarray]:
        """Named arrays that travel with the sample, the same names for every sample of a group."""
        return self._record.extras

    # --- what is added ---

    async def generate(self, context: Context | None = None, *, tools: Messages | None = None, **sampling: Any) -> Response:
        """Sample a turn: a Response with its text, token_ids [R], logprobs, versions and finish_reason (stop, or length where it was cut).

        context: all that the policy is to see, as an OpenAI client would send it, or token ids; None: the record as it is. What goes
        beyond the record is added; one that begins with an earlier record goes on from that, and one that begins with none begins another
        sample of this trajectory.
        sampling: in SGLang's names, over those of the run, such as max_new_tokens and stop. Where there is no room for a token the turn has
        none, finish_reason length and as prompt_ids all that the policy was to see; what did not fit is not recorded.
        """
        self._check_idle()
        if self.engines is None:
            raise HookError("session.generate needs an engine, and engine.engine is none")
        before = self.snapshot()
        self._follow_context(context, tools)
        if (request := self.request(**sampling)) is None:
            made = self.cut_off()
            self.restore(before)
            self._record.finish_reason = "length"
            return made if self.responses() else self.record_turn(made)
        self._is_busy = True
        try:
            (made,) = await self._sample([request])
        finally:
            self._is_busy = False
        return self.record_turn(made)

    def observe(self, what: Context | str, *, is_trained: bool = False) -> None:
        """Add what no policy said: new chat messages (a tool's answer), text, or token ids. Version -1, logprob 0, mask 0.

        is_trained: mask 1, a demonstration. Messages become tokens with the next turn, and are none. Raises UsageError during a turn.
        """
        self._check_idle()
        if _is_messages(what):
            if is_trained:
                raise UsageError("messages cannot be a demonstration; observe its text or token ids with is_trained=True")
            if not self._record.messages:
                raise UsageError("messages were added to a prompt that is text; add text or token ids, or give generate() all messages")
            self._record.messages.extend(dict(message) for message in what)
            return
        self._render()
        ids = self.tokenizer.encode(what) if isinstance(what, str) else token_ids("token ids", what)
        self._record.append(ids, np.zeros(len(ids)), [(NO_VERSION, len(ids))], is_trained=is_trained)
        if is_trained:
            self._record.end = self.tokenizer.eos_token_id if len(ids) and ids[-1] == self.tokenizer.eos_token_id else None
            self._record.text = what if isinstance(what, str) else self.tokenizer.decode(ids)

    def branch(self) -> "Session":
        """Another session that goes on from here: a further sample of the same trajectory, with a reward of its own.

        What was sampled so far is context in it, trained only where it was sampled. Raises UsageError during a turn.
        """
        self._check_idle()
        other = Session(self.task, self.engines, self.tokenizer, max_context_len=self.max_context_len)
        other._record = self._record.branched()
        other.tools, other.metadata, other.branches, other.errors = self.tools, dict(self.metadata), self.branches, self.errors
        other.turns = self.turns
        self.branches.append(other)
        return other

    # --- for those that build on it ---

    def snapshot(self) -> "Session":
        """The session as it is now, to read or to restore; it shares metadata and extras."""
        other = copy.copy(self)
        other._record, other._closed = replace(self._record, messages=list(self._record.messages)), list(self._closed)
        return other

    def restore(self, before: "Session") -> None:
        """Go back to what it was at this snapshot."""
        self._record, self._closed, self.tools = before._record, before._closed, before.tools

    def request(self, **sampling: Any) -> Task | None:
        """The task that makes the next turn; None where the context is full."""
        self._render()
        ids = self.token_ids
        chosen = self.task.sampling | sampling
        if self.max_context_len:
            room = self.max_context_len - len(ids)
            if room <= 0:
                return None
            chosen["max_new_tokens"] = min(room, room if (most := chosen.get("max_new_tokens")) is None else most)
        temperature = logprob_temperature(chosen)
        if self._record.is_made and self._record.temperature not in (None, temperature):
            raise UsageError(
                f"a turn at temperature {temperature:g} after one at {self._record.temperature:g}: the logprobs of a sample have one "
                "temperature; session.branch() first"
            )
        self._record.temperature = temperature
        return msgspec.structs.replace(self.task, prompt_ids=ids, sampling=chosen, session=self.id)

    def cut_off(self) -> Response:
        """The turn of a session with a full context."""
        none = NONE.astype(np.float32)
        return Response(
            task=self.task, prompt_ids=self.token_ids, token_ids=NONE, logprobs=none, versions=[], text="", finish_reason="length"
        )

    def record_turn(self, made: Response) -> Response:
        """Record a turn, and give it its text."""
        record = self._record
        made.text = without_stop(self.tokenizer.decode(made.token_ids), made)
        record.append(made.token_ids, made.logprobs, made.versions, is_trained=True)
        record.num_turns += 1
        record.text, record.finish_reason = made.text, made.finish_reason
        record.end = int(made.token_ids[-1]) if made.finish_reason == "stop" and len(made.token_ids) else None
        if record.messages:
            is_whole = record.reply_at + len(made.token_ids) == len(record.token_ids)
            text = made.text if is_whole else without_stop(self.tokenizer.decode(record.token_ids[record.reply_at :]), made)
            record.messages[record.num_rendered - record.has_reply :] = [{"role": "assistant", "content": text}]
            record.has_reply, record.num_rendered = True, len(record.messages)
        return made

    def responses(self) -> list[Response]:
        """Its samples: what was closed by another context, then the record. Of a session without a turn there is none."""
        return [self._response(record) for record in (*self._closed, self._record) if record.is_made]

    def left_over(self) -> list[Response]:
        """What there is of it and its branches when it fails: the tokens alone."""
        made = [response for session in self.branches for response in session.responses()] or [self.cut_off()]
        return [msgspec.structs.replace(response, reward=None, metadata={}, extras={}) for response in made]

    def _response(self, record: _Record) -> Response:
        made = {name: getattr(record, name) for name in KEPT}
        made |= {"turn": max(0, record.num_turns - 1), "messages": record.messages[: record.num_rendered]}
        return Response(task=self.task, reward=self.reward, metadata=dict(self.metadata), **made)

    def _check_idle(self) -> None:
        if self._is_busy:
            raise UsageError("a session makes one turn at a time; await it, or call session.branch() before it for several at once")

    async def _sample(self, requests: list[Task]) -> list[Response]:
        assert self.engines is not None
        begin, started = time.time(), time.perf_counter()
        try:
            made = await self.engines.sample(requests)
            self.turns.append((begin, time.perf_counter() - started))
            return made
        except (SlimebusError, Unfinished) as error:
            if getattr(error, "retryable", True):
                self.errors.append(error)
            raise

    # --- messages to tokens ---

    def _follow_context(self, context: Context | None, tools: Messages | None) -> None:
        """Bring the record to this context. tools: None for those it has, [] for none."""
        wanted = self.tools if tools is None else tools or None
        if context is None:
            context = self._record.messages if wanted != self.tools else []
            if not context:
                return
        if _is_messages(context):
            given = [dict(message) for message in context]
            if found := max((one for one in (self._record, *self._closed) if one.begins(given, wanted)), key=_num_messages, default=None):
                self._go_on_from(found)
                known = self._record.messages
                num_known = len(known)
                known.extend(given[num_known:])
                try:
                    self._render()
                except BaseException:  # the template may refuse what is new: without it the conversation goes on
                    del known[num_known:]
                    raise
                return
            prompt_ids = self.tokenizer.encode_prompt(given, *([wanted] if wanted else []))
            self.tools = wanted  # not before: the template may refuse it all
            self._change_record(_Record(prompt_ids, given, wanted, len(given)))
            return
        self._render()
        ids, held = token_ids("context", context), self.token_ids
        if np.array_equal(ids[: len(held)], held):
            self.observe(ids[len(held) :])
        else:
            self._change_record(_Record(ids, [], self.tools))

    def _go_on_from(self, record: _Record) -> None:
        """With an earlier record; that one stays as it was in snapshots."""
        if record is not self._record:
            self._closed = [one for one in self._closed if one is not record]
            self._change_record(replace(record, messages=list(record.messages)))
            self.tools = record.tools

    def _change_record(self, record: _Record) -> None:
        """Go on with another record; the one so far is a sample, where anything was made in it."""
        if self._record.is_made:
            self._closed.append(self._record)
        record.num_turns = self._record.num_turns
        self._record = record

    def _render(self) -> None:
        """The messages that are new become tokens behind the others."""
        record, tools = self._record, [self.tools] if self.tools else []
        known, new = record.messages[: record.num_rendered], record.messages[record.num_rendered :]
        if not new:
            return
        if not len(record.token_ids):  # nothing was said yet: it is all one prompt
            record.prompt_ids = self.tokenizer.encode_prompt(record.messages, *tools)
        else:
            if not record.has_reply:
                known.append({"role": "assistant", "content": self.tokenizer.decode(record.token_ids[record.reply_at :])})
            ids = self.tokenizer.encode_turn(known, new, *tools, end=record.end)
            record.messages[: record.num_rendered] = known
            record.append(ids, np.zeros(len(ids)), [(NO_VERSION, len(ids))], is_trained=False)
        record.num_rendered, record.has_reply, record.reply_at = len(record.messages), False, len(record.token_ids)


def without_stop(text: str, response: Response) -> str:
    """As SGLang's own text: without the stop string that ended it, and what follows that."""
    stop = response.task.sampling.get("stop") or []
    found = [text.find(one) for one in ([stop] if isinstance(stop, str) else stop)] if response.finish_reason == "stop" else []
    return text[: min((at for at in found if at >= 0), default=len(text))]


def _num_messages(record: _Record) -> int:
    return len(record.messages)


def _is_messages(what: Any) -> TypeGuard[Messages]:
    return isinstance(what, list | tuple) and bool(what) and isinstance(what[0], dict)


def _is_same(known: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether a message of a context is the one that the record has; of a reply clients may leave out the reasoning, and what is empty."""
    names = (known.keys() | given.keys()) & {"role", "content", "tool_calls", "tool_call_id", "name"}
    a, b = ({name: message.get(name) or None for name in names} for message in (known, given))
    if known["role"] == "assistant":
        for message in (a, b):
            message["content"] = str(message.get("content") or "").rpartition("</think>")[2].strip()
    return a == b
