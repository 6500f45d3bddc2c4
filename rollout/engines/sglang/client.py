"""Client of one engine, over SGLang's native HTTP API (docs/engine-contract.md)."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from rollout.samples.response import Completion, EngineError, plain
from slimebus.bus.errors import FatalWeightsError, Unreachable, UsageError

log = logging.getLogger("rollout")
T = TypeVar("T")
Sampling = dict[str, Any]

GENERATE_TIMEOUT_S = 3600.0
"""The longest that one call may take."""
WAIT_NOTE_S = 15.0
"""How often a wait for an engine that starts is logged."""
RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 2.0
# SGLang aborts every request with an id that begins with the given one: a closing mark keeps "w-1" from ending "w-10".
RID_END = "."
UNAUTHORIZED = 401
DONE_STATUS, RETRIED_STATUS = (200, 202), (502, 503, 504)


class _FinishReason(msgspec.Struct):
    type: str


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


_Scored = tuple[float | None, int, Any]
"""The logprob of a token, and its id."""


class _MetaInfo(msgspec.Struct):
    id: str
    finish_reason: _FinishReason | None
    weight_version: str = "default"
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[_Scored] | None = None
    input_token_logprobs: list[_Scored] | None = None


class _Answer(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] = msgspec.field(default_factory=list)


_answers, _object = msgspec.json.Decoder(list[_Answer]), msgspec.json.Decoder(dict[str, Any])


class EngineClient:
    """Talks to one URL; use it as `async with`, or call `close`. Not tied to a model unless `vocab_size` is given.

    `vocab_size`: token ids are checked against it before they are sent, for a real SGLang dies of an id outside its
    vocabulary. `retry_s`: how long a refused or lost connection (or a 502, 503, 504) is retried before Unreachable.
    """

    def __init__(self, url: str, *, vocab_size: int | None = None, retry_s: float = 30.0, api_key: str = "") -> None:
        """api_key: sent with every call, where the engine asks for one."""
        self.url, self._api_key = url.rstrip("/"), api_key
        self.vocab_size = vocab_size
        self._retry_s = retry_s
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, for good: a call that is being tried again ends with Unreachable."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling | Sequence[Sampling], rids: Sequence[str], *,
        cache_key: str = "", session: str = "",
    ) -> list[Completion]:  # fmt: skip
        """One completion for each prompt, in order; `sampling` is one dict for all or one each, `rids` one each.

        cache_key: only requests with the same one share keys and values of a common prefix. session: what a router keeps together.
        A lost connection is retried under other names of the same rids, since SGLang refuses one that it still runs: a sequence may be
        generated twice, but is returned once.
        UsageError for a request that the engine refuses (400) or with token ids outside the vocabulary, EngineError
        for any other answer.
        """
        body: dict[str, Any] = {"input_ids": prompts, "sampling_params": sampling}
        body |= {"extra_key": cache_key} if cache_key else {}
        return [self._completion(answer) for answer in await self._generate(body, rids, session)]

    async def score(self, tokens: list[int], rid: str) -> npt.NDArray[np.float32]:
        """log p(tokens[t] | tokens[:t]) of the model that is served, at temperature 1 always, float32 [T]; 0 for the first.

        Raises as `generate`.
        """
        body = {"input_ids": [tokens], "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
        (answer,) = await self._generate(body, [rid])
        scored = answer.meta_info.input_token_logprobs or []  # the first has none, for nothing stands before it
        return self._logprobs(rid, tokens, [(0.0, tokens[0], None), *scored[1:]])

    async def _generate(self, body: dict[str, Any], rids: Sequence[str], session: str = "") -> list[_Answer]:
        self._check(body["input_ids"], rids)
        reply = await self._call("/generate", {**body, "return_logprob": True}, rids=rids, timeout_s=GENERATE_TIMEOUT_S)
        return self._answers(reply, len(rids))

    def _answers(self, reply: bytes, number: int) -> list[_Answer]:
        answers = self._decoded("/generate", reply, _answers)
        if len(answers) != number:
            raise EngineError(f"engine {self.url}: {len(answers)} answers to {number} prompts")
        return answers

    def _decoded(self, path: str, reply: bytes, decoder: msgspec.json.Decoder[T]) -> T:
        try:
            return decoder.decode(reply)
        except msgspec.DecodeError as error:
            raise EngineError(f"engine {self.url}: the answer to {path} is not SGLang's: {error}") from None

    def _check(self, prompts: Sequence[list[int]], rids: Sequence[str]) -> None:
        if len(rids) != len(prompts):
            raise UsageError(f"generate: {len(rids)} rids for {len(prompts)} prompts; give one each")
        for rid, prompt in zip(rids, prompts, strict=True):
            if not prompt:
                raise UsageError(f"request {rid}: the prompt has no tokens")
            if self.vocab_size is not None and not (min(prompt) >= 0 and max(prompt) < self.vocab_size):
                outside = next(token for token in prompt if not 0 <= token < self.vocab_size)
                where = f"outside the vocabulary of {self.vocab_size} of the model at {self.url}"
                raise UsageError(f"request {rid}: token id {outside} is {where}; the tokenizer and the model do not match")

    def _completion(self, answer: _Answer) -> Completion:
        meta = answer.meta_info
        if meta.finish_reason is None:
            raise EngineError(f"engine {self.url}: request {meta.id} was answered before it finished")
        logprobs = self._logprobs(meta.id, answer.output_ids, meta.output_token_logprobs or [])
        spans = [(span.version, span.start, span.end) for span in meta.weight_versions or []]
        spans = spans or [(meta.weight_version, 0, len(logprobs))]
        return Completion(np.array(answer.output_ids, dtype=np.int32), logprobs, meta.finish_reason.type, spans)

    def _logprobs(self, name: str, tokens: list[int], scored: list[_Scored]) -> npt.NDArray[np.float32]:
        if len(scored) != len(tokens):
            raise EngineError(f"engine {self.url}: request {name} has {len(tokens)} tokens and {len(scored)} logprobs")
        if [entry[1] for entry in scored] != tokens:
            raise EngineError(f"engine {self.url}: request {name} has logprobs of other tokens than its own")
        logprobs = np.array([entry[0] for entry in scored], dtype=np.float32)
        if not np.isfinite(logprobs).all():
            raise EngineError(f"engine {self.url}: request {name} has logprobs that are no numbers; its weights are probably broken")
        return logprobs

    # -- control -------------------------------------------------------------------------------------------------

    async def abort(self, rid: str) -> None:
        """End the request `rid`; its generate call returns what it has. No error when there is none."""
        await self._call("/abort_request", {"rid": rid + RID_END})

    async def pause(self, mode: str = "in_place") -> None:
        """Stop generating: `in_place` keeps keys and values, `retract` computes them again later, `abort` ends what runs."""
        await self._call("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._call("/continue_generation", {})

    async def update_weights_from_disk(self, path: str, version: str, *, timeout_s: float = 600.0) -> None:
        """Serve the safetensors in directory `path` (on the engine's machine) as `version`.

        Pause first: without it SGLang waits until no request is left. WeightsError when the engine refuses them;
        the old weights and version then stay.
        """
        # flush_cache must be off: after an in_place pause SGLang answers 400 to it although the weights did change.
        body = {"model_path": path, "weight_version": version, "flush_cache": False}
        try:
            await self._call("/update_weights_from_disk", body, timeout_s=timeout_s)
        except UsageError as error:
            raise FatalWeightsError(f"weights {version} of {path} were refused: {error.text}") from None

    async def post_once(self, path: str, body: dict[str, Any], *, timeout_s: float = 60.0) -> bytes:
        """The answer to a control call that must not come twice: a lost connection is Unreachable at once. UsageError for a refusal."""
        return await self._call(path, body, timeout_s=timeout_s, retry_s=0.0)

    async def flush_cache(self) -> None:
        """Forget cached prefixes; UsageError while requests are in flight."""
        await self._call("/flush_cache", {})

    # -- state ---------------------------------------------------------------------------------------------------

    async def model_info(self, *, retry_s: float | None = None) -> dict[str, Any]:
        """`/model_info`: model_path and weight_version among others."""
        return await self._get_json("/model_info", retry_s)

    async def server_info(self, *, retry_s: float | None = None) -> dict[str, Any]:
        """`/server_info`: how the engine was started, and its load in `internal_states`."""
        return await self._get_json("/server_info", retry_s)

    async def weight_version(self, *, retry_s: float | None = None) -> str:
        """The version name that the engine serves; retry_s: for how long a lost connection is tried again, if not as usual."""
        return str((await self.model_info(retry_s=retry_s)).get("weight_version", "default"))

    async def is_ready(self, timeout_s: float = 2.0) -> bool:
        """Whether `/ready` answers 200 within `timeout_s`: it is up and not paused. Never raises."""
        return await self.status("/ready", timeout_s) == 200

    async def answers(self, timeout_s: float, *, generates: bool = False) -> bool:
        """Whether anything answers within `timeout_s`, an error too; generates: whether a token is made within it. Never raises."""
        # /ping is the HTTP process's own; /health_generate is 200 once any request gets a token.
        return await self.status("/health_generate", timeout_s) == 200 if generates else await self.status("/ping", timeout_s) != 0

    async def wait_ready(self, timeout_s: float, *, is_dead: Callable[[], bool] | None = None) -> None:
        """Return once it is up, also when it is paused; Unreachable after `timeout_s`, or once `is_dead()`. UsageError for a router."""
        begun_s = noted_s = time.monotonic()
        while 200 not in (found := [await self.status(path, 2.0) for path in ("/ready", "/ping")]):
            if found == [404, 404]:
                what = f"what answers at {self.url} knows neither /ready nor /ping and is no engine"
                raise UsageError(f"{what}; a router does not pass weights on: give the addresses of the engines behind it")
            if UNAUTHORIZED in found:
                raise UsageError(f"engine {self.url} asks for a key that is not the one given; set engine.engine_api_key to its --api-key")
            if is_dead is not None and is_dead():
                raise Unreachable(f"engine {self.url}: its process ended before it was ready")
            if (now := time.monotonic()) > begun_s + timeout_s:
                raise Unreachable(f"engine {self.url} was not ready within {timeout_s:.0f} s")
            if now > noted_s + WAIT_NOTE_S:
                log.info("waiting for the engine at %s to be ready (%.0f of %.0f s)", self.url, now - begun_s, timeout_s)
                noted_s = now
            await asyncio.sleep(0.1)

    # -- HTTP ----------------------------------------------------------------------------------------------------

    async def _get_json(self, path: str, retry_s: float | None = None) -> dict[str, Any]:
        return self._decoded(path, await self._call(path, retry_s=retry_s), _object)

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise Unreachable(f"engine {self.url}: the connection to it was closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            headers = {"Content-Type": "application/json"}
            headers |= {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self._session

    async def status(self, path: str, timeout_s: float) -> int:
        """Of the answer to a GET; 0 when there is none in time. Never raises."""
        try:
            return (await self._send_once(path, None, timeout_s))[0]
        except (aiohttp.ClientError, TimeoutError, Unreachable):
            return 0

    async def _call(
        self, path: str, body: dict[str, Any] | None = None, *, rids: Sequence[str] | str = (), timeout_s: float = 60.0,
        retry_s: float | None = None, headers: Mapping[str, str] | None = None, method: str = "",
    ) -> bytes:  # fmt: skip
        """The body of a 200 (or 202) to a POST, or GET without a body. Lost connections and busy answers are retried for `retry_s`.

        rids: of the requests in the body, which have another name in each attempt.
        """
        retry_s = self._retry_s if retry_s is None else retry_s
        failing_since_s, pause_s = 0.0, RETRY_FIRST_S
        for attempt in itertools.count():
            names = _attempt_rid(rids, attempt) if isinstance(rids, str) else [_attempt_rid(rid, attempt) for rid in rids]
            named = {**(body or {}), "rid": names} if rids else body
            payload = None if named is None else msgspec.json.encode(named, enc_hook=_as_plain)
            try:
                status, reply = await self._send_once(path, payload, timeout_s, headers, method)
            except TimeoutError:
                raise Unreachable(f"engine {self.url} did not answer {path} within {timeout_s:.0f} s") from None
            except aiohttp.ClientError as error:
                status, reply = 0, (str(error) or type(error).__name__).encode()
            if status in DONE_STATUS:
                return reply
            if status and status not in RETRIED_STATUS:
                text = f"engine {self.url}: {path} answered {status}: {_error_text(reply)}"
                raise UsageError(text) if 400 <= status < 500 else EngineError(text)
            # Counted from the first failure: how long a request ran before it was lost is not part of the outage.
            failing_since_s = failing_since_s or time.monotonic()
            if time.monotonic() + pause_s > failing_since_s + retry_s:
                last = f"{status} " if status else ""
                raise Unreachable(f"engine {self.url}: {path} failed for {retry_s:.0f} s, last: {last}{_error_text(reply)}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_LONGEST_S)
        raise AssertionError("unreachable")

    async def _send_once(
        self, path: str, payload: bytes | None, timeout_s: float, headers: Mapping[str, str] | None = None, method: str = ""
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        method = method or ("GET" if payload is None else "POST")
        async with self._open().request(method, self.url + path, data=payload, timeout=timeout, headers=headers) as response:
            return response.status, await response.read()


def _attempt_rid(rid: str, attempt: int) -> str:
    """What an attempt at the request is called; /abort_request with the first attempt's name ends any."""
    return rid + RID_END + (f"{attempt}{RID_END}" if attempt else "")


def _as_plain(value: Any) -> Any:
    if (found := plain(value)) is value:
        raise TypeError(f"a {type(value).__name__} cannot be sent to an engine")
    return found


def _error_text(reply: bytes) -> str:
    """The message in an error answer, whichever of SGLang's shapes it has."""
    try:
        value = msgspec.json.decode(reply)
    except msgspec.DecodeError:
        return reply[:500].decode(errors="replace").strip()
    if isinstance(value, dict):
        error = value.get("error", value.get("message", value))
        value = error.get("message", error) if isinstance(error, dict) else error
    return str(value)[:500]
