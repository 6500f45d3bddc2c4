"""Client of one engine, or of a router in front of several, over SGLang's native HTTP API (docs/engine-contract.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from slimebus.errors import SlimebusError, Unreachable, UsageError, WeightsError

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]

RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 2.0
# SGLang aborts every request whose id begins with the given one: a closing mark keeps "w-1" from ending "w-10".
RID_END = "."
UNPROCESSABLE = 422
RETRIED_STATUS = (502, 503, 504)


class EngineError(SlimebusError):
    """An engine answered, and not with what was asked for; the text names its URL."""

    code = "engine"


@dataclass
class Completion:
    """One generated sequence of T tokens, the stop token included.

    output_ids    int32 [T]
    logprobs      float32 [T], of the distribution before top-k, top-p and min-p, at the sampling temperature
    finish_reason stop, length, or abort (what was generated until then is here)
    versions      (weight version, first token, one past the last token), in order, covering T
    """

    output_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: str
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rid: str = ""


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _MetaInfo(msgspec.Struct):
    id: str
    finish_reason: _FinishReason | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str = "default"
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class _Answer(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] = msgspec.field(default_factory=list)
    text: str = ""


_decode_answers = msgspec.json.Decoder(list[_Answer]).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


class _BatchRefused(Exception):
    """This URL wants one prompt a request: sglang-router 0.3.2 takes one rid only, and answers 422 to a list."""


class EngineClient:
    """Talks to one URL; use it as `async with`, or call `close`. Not tied to a model unless `vocab_size` is given.

    `vocab_size`: token ids are checked against it before they are sent, for a real SGLang dies of an id outside its
    vocabulary. `retry_s`: how long a refused or lost connection (or a 502, 503, 504) is retried before Unreachable.
    `request_timeout_s`: the longest one generate call may take. Control calls must go to engines: a router does not
    pass them on.
    """

    def __init__(self, url: str, *, vocab_size: int | None = None, retry_s: float = 30.0, request_timeout_s: float = 3600.0) -> None:
        self.url = url.rstrip("/")
        self.vocab_size = vocab_size
        self._retry_s, self._request_timeout_s = retry_s, request_timeout_s
        self._takes_batches = True
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, for good: a call that is being tried again ends with Unreachable."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- generation ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids_batch: Sequence[TokenIds],
        sampling: dict[str, Any] | list[dict[str, Any]],
        rids: Sequence[str],
        *,
        cache_key: str = "",
    ) -> list[Completion]:
        """One completion for each prompt, in order; `sampling` is one dict for all or one each, `rids` one each.

        cache_key: only requests with the same one share keys and values of a common prefix. A lost connection is retried under the
        same rids, so a sequence may be generated twice, but is returned once. UsageError for a request that the
        engine refuses (400) or whose token ids are outside the vocabulary, EngineError for anything else it answers.
        """
        prompts = [np.asarray(prompt, dtype=np.int64).tolist() for prompt in input_ids_batch]
        self._check(prompts, rids)
        names = [rid + RID_END for rid in rids]
        extra = {"extra_key": cache_key} if cache_key else {}
        if self._takes_batches:
            try:
                return await self._generate_batch(prompts, sampling, names, extra)
            except _BatchRefused:
                self._takes_batches = False
        samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        return await _all_or_cancel([self._generate_one(*one, extra) for one in zip(prompts, samplings, names, strict=True)])

    async def _generate_batch(
        self, prompts: list[list[int]], sampling: object, names: list[str], extra: dict[str, str]
    ) -> list[Completion]:
        body = {"input_ids": prompts, "sampling_params": sampling, "rid": names, "return_logprob": True, **extra}
        answers = self._answers(await self._call("POST", "/generate", body, timeout_s=self._request_timeout_s), _decode_answers)
        if len(answers) != len(prompts):
            raise EngineError(f"engine {self.url}: {len(answers)} answers to {len(prompts)} prompts")
        return [self._completion(answer) for answer in answers]

    async def _generate_one(self, prompt: list[int], sampling: object, name: str, extra: dict[str, str]) -> Completion:
        body = {"input_ids": prompt, "sampling_params": sampling, "rid": name, "return_logprob": True, **extra}
        reply = await self._call("POST", "/generate", body, timeout_s=self._request_timeout_s)
        return self._completion(self._answers(reply, _decode_answer))

    def _answers(self, reply: bytes, decode: Callable[[bytes], T]) -> T:
        try:
            return decode(reply)
        except msgspec.DecodeError as error:
            raise EngineError(f"engine {self.url}: the answer to /generate is not SGLang's: {error}") from None

    def _check(self, prompts: list[list[int]], rids: Sequence[str]) -> None:
        if len(rids) != len(prompts):
            raise UsageError(f"generate: {len(rids)} rids for {len(prompts)} prompts; give one each")
        for rid, prompt in zip(rids, prompts, strict=True):
            if not prompt:
                raise UsageError(f"request {rid}: the prompt has no tokens")
            if self.vocab_size is not None and not (min(prompt) >= 0 and max(prompt) < self.vocab_size):
                outside = next(token for token in prompt if not 0 <= token < self.vocab_size)
                raise UsageError(
                    f"request {rid}: token id {outside} is outside the vocabulary of {self.vocab_size} of the model at {self.url}; "
                    "the tokenizer and the model do not match"
                )

    def _completion(self, answer: _Answer) -> Completion:
        meta = answer.meta_info
        if meta.finish_reason is None:
            raise EngineError(f"engine {self.url}: request {meta.id} was answered before it finished")
        scored = meta.output_token_logprobs or []
        if len(scored) != len(answer.output_ids):
            raise EngineError(f"engine {self.url}: request {meta.id} has {len(answer.output_ids)} tokens and {len(scored)} logprobs")
        num_tokens = len(scored)
        logprobs = np.array([entry[0] for entry in scored], dtype=np.float32)
        if not np.isfinite(logprobs).all():
            raise EngineError(f"engine {self.url}: request {meta.id} has logprobs that are no numbers; its weights are probably broken")
        spans = [(span.version, span.start, span.end) for span in meta.weight_versions or []]
        return Completion(
            output_ids=np.array(answer.output_ids, dtype=np.int32),
            logprobs=logprobs,
            finish_reason=meta.finish_reason.type,
            versions=spans or [(meta.weight_version, 0, num_tokens)],
            text=answer.text,
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
            rid=meta.id.removesuffix(RID_END),
        )

    # -- control (engines only, not routers) ---------------------------------------------------------------------

    async def abort(self, rid: str) -> None:
        """End the request `rid`; its generate call returns what it has. No error when there is none."""
        await self._call("POST", "/abort_request", {"rid": rid + RID_END})

    async def abort_all(self) -> None:
        """End every request."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def pause(self, mode: str = "in_place") -> None:
        """Stop generating: `in_place` keeps keys and values, `retract` computes them again later, `abort` ends what runs."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._call("POST", "/continue_generation", {})

    async def update_weights_from_disk(self, path: str, version: str, *, timeout_s: float = 600.0) -> None:
        """Serve the safetensors in directory `path` (on the engine's machine) as `version`.

        Pause first: without it SGLang waits until no request is left. WeightsError when the engine refuses them;
        the old weights and version then stay.
        """
        # flush_cache must be off: after an in_place pause SGLang answers 400 to it although the weights did change.
        body = {"model_path": path, "weight_version": version, "flush_cache": False}
        try:
            await self._call("POST", "/update_weights_from_disk", body, timeout_s=timeout_s)
        except UsageError as error:
            raise WeightsError(f"weights {version} of {path} were refused: {error.text}", retryable=False) from None

    async def post_once(self, path: str, body: dict[str, Any], *, timeout_s: float = 60.0) -> bytes:
        """The answer to a control call that must not come twice: a lost connection is Unreachable at once. UsageError for a refusal."""
        return await self._call("POST", path, body, timeout_s=timeout_s, retry_s=0.0)

    async def flush_cache(self) -> None:
        """Forget cached prefixes; UsageError while requests are in flight."""
        await self._call("POST", "/flush_cache", {})

    # -- state ---------------------------------------------------------------------------------------------------

    async def model_info(self, *, retry_s: float | None = None) -> dict[str, Any]:
        """`/model_info`: model_path and weight_version among others."""
        return self._object(await self._call("GET", "/model_info", retry_s=retry_s), "/model_info")

    async def server_info(self) -> dict[str, Any]:
        """`/server_info`: how the engine was started, and its load in `internal_states`."""
        return self._object(await self._call("GET", "/server_info"), "/server_info")

    async def weight_version(self, *, retry_s: float | None = None) -> str:
        """The version name that the engine serves; retry_s: for how long a lost connection is tried again, if not as usual."""
        return str((await self.model_info(retry_s=retry_s)).get("weight_version", "default"))

    async def is_ready(self, timeout_s: float = 2.0) -> bool:
        """Whether `/ready` answers 200 within `timeout_s`: it is up and not paused. Never raises."""
        return await self._status("/ready", timeout_s) == 200

    async def is_healthy(self, timeout_s: float = 25.0) -> bool:
        """Whether `/health` answers 200 within `timeout_s`; a real SGLang generates a token for it."""
        return await self._status("/health", timeout_s) == 200

    async def wait_ready(self, timeout_s: float, *, is_dead: Callable[[], bool] | None = None) -> None:
        """Return once it is up, also when it is paused; Unreachable after `timeout_s`, or once `is_dead()`. UsageError for a router."""
        deadline_s = time.monotonic() + timeout_s
        while 200 not in (found := [await self._status(path, 2.0) for path in ("/ready", "/ping")]):
            if found == [404, 404]:
                raise UsageError(
                    f"what answers at {self.url} knows neither /ready nor /ping and is no engine; a router does not pass weights on: "
                    "give the addresses of the engines behind it"
                )
            if is_dead is not None and is_dead():
                raise Unreachable(f"engine {self.url}: its process ended before it was ready")
            if time.monotonic() > deadline_s:
                raise Unreachable(f"engine {self.url} was not ready within {timeout_s:.0f} s")
            await asyncio.sleep(0.1)

    # -- HTTP ----------------------------------------------------------------------------------------------------

    def _object(self, reply: bytes, path: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode(reply, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise EngineError(f"engine {self.url}: the answer to {path} is not a JSON object: {error}") from None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._is_closed:
            raise Unreachable(f"engine {self.url}: the connection to it was closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"})
        return self._session

    async def _status(self, path: str, timeout_s: float) -> int:
        """Of the answer to a GET; 0 when there is none in time. Never raises."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._open().get(self.url + path, timeout=timeout) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError, Unreachable):
            return 0

    async def _call(self, method: str, path: str, body: object = None, *, timeout_s: float = 60.0, retry_s: float | None = None) -> bytes:
        """The body of a 200; lost connections and busy answers are retried for `retry_s` from the first of them."""
        retry_s = self._retry_s if retry_s is None else retry_s
        import aiohttp

        payload = None if body is None else msgspec.json.encode(body)
        failing_since_s, pause_s = 0.0, RETRY_FIRST_S
        while True:
            try:
                status, reply = await self._send(method, path, payload, timeout_s)
            except TimeoutError:
                raise Unreachable(f"engine {self.url} did not answer {path} within {timeout_s:.0f} s") from None
            except aiohttp.ClientError as error:
                status, reply = 0, (str(error) or type(error).__name__).encode()
            if status == 200:
                return reply
            if status == UNPROCESSABLE and isinstance(body, dict) and isinstance(body.get("rid"), list):
                raise _BatchRefused
            if status and status not in RETRIED_STATUS:
                raise self._refusal(status, path, reply)
            # Counted from the first failure: how long a request ran before it was lost is not part of the outage.
            failing_since_s = failing_since_s or time.monotonic()
            if time.monotonic() + pause_s > failing_since_s + retry_s:
                raise Unreachable(
                    f"engine {self.url}: {path} failed for {retry_s:.0f} s, last: {f'{status} ' if status else ''}{_text(reply)}"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_LONGEST_S)

    async def _send(self, method: str, path: str, payload: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        async with self._open().request(method, self.url + path, data=payload, timeout=timeout) as response:
            return response.status, await response.read()

    def _refusal(self, status: int, path: str, reply: bytes) -> SlimebusError:
        text = f"engine {self.url}: {path} answered {status}: {_text(reply)}"
        return UsageError(text) if 400 <= status < 500 else EngineError(text)


async def _all_or_cancel(calls: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; when one fails, or the caller is cancelled, the others are cancelled too."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _text(reply: bytes) -> str:
    """The message in an error answer, whichever of SGLang's shapes it has."""
    try:
        value = msgspec.json.decode(reply)
    except msgspec.DecodeError:
        return reply[:500].decode(errors="replace").strip()
    if isinstance(value, dict):
        error = value.get("error", value.get("message", value))
        value = error.get("message", error) if isinstance(error, dict) else error
    return str(value)[:500]
