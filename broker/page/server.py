"""The page over HTTP: files, events, samples, replay, metrics.

GET /  static/...   GET /events   GET /groups?state=&text=   GET /group?id=   GET /config   GET /metrics?per=process   POST /replay
GET /healthz   GET /readyz?name=
"""

import asyncio
import functools
import hmac
import logging
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec
from aiohttp import web

from broker.inspect.changes import BufferEditor
from broker.inspect.reader import STATES, StoreSnapshot, open_snapshot
from broker.inspect.show import text_of
from broker.page import samples
from broker.page.history import History
from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import EditReply
from slimebus.client.connect import connect_without_joining
from slimebus.config import Resolved
from slimebus.config.saved import without_secrets
from slimebus.view.run_status import RunStatus

T = TypeVar("T")
log = logging.getLogger("slimebus.page")

POLL_S, HISTORY_S = 1.0, 2.0
TIMES_ANSWER = 50.0
"""The broker is asked again after so many times as long as it took to answer: looking costs it a fiftieth of its time at most."""
ALIVE_S = 10.0
SENT_S = 0.2
"""In which viewers get the last frames."""
MAX_BODY_BYTES = 1 << 20
MAX_PATH = 200
"""Characters; the disk refuses longer names."""
ANSWER_S, EDIT_S = 5.0, 30.0
PROBE_S = 2.0
"""A probe waits so long for the broker."""
PROBES = {"/healthz": 60.0, "/readyz": 5.0}
"""For Kubernetes, without a token -> the seconds in which the broker's loop must have had a turn."""
NOT_READY = ("gone", "fenced", "starting", "blocked")
"""How the states of processes begin that are not ready."""
LEFT_OUT = ("clients", "steps", "parked", "evaluations", "skipped_prompts")
"""Of the status: in the records, or shown otherwise."""
OF_CLIENT, OF_METRICS = ("name", "role", "state", "version", "leases", "silent_s"), ("sync_s", "tokens")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
STATIC = Path(str(files("broker.page"))) / "static"


class Live(RunStatus):
    """The newest status, for one thread that asks. took_s: how long the broker took to answer; answered_at: when it did, monotonic."""

    def __init__(self, resolved: Resolved, broker: str | None) -> None:
        super().__init__(resolved, broker, what="page", timeout_s=ANSWER_S)
        self.took_s, self.answered_at = 0.0, -math.inf

    def poll(self, patience_s: float = 0.0) -> None:
        """Ask; without a broker that answers the status stays."""
        started = time.monotonic()
        super().poll(patience_s)
        now = time.monotonic()
        self.took_s, self.answered_at = now - started, self.answered_at if self.problem else now

    def why_not(self, name: str, within_s: float) -> str:
        """Why the broker, or the process `name` that is connected to it, is not at work; empty when it is."""
        silent_s = time.monotonic() - self.answered_at
        if silent_s > within_s:
            return "the broker has not answered yet" if math.isinf(silent_s) else f"the broker's loop last answered {silent_s:.0f} s ago"
        states = [client["state"] for client in self.status["clients"] if client["name"] == name]
        if name and not states:
            return f"no process {name!r} is listed in the run's status"
        return next((f"{name} is {word}" for word in NOT_READY for state in states if state.startswith(word)), "")

    def replay(self, groups: Sequence[str]) -> EditReply:
        """Have dead or dropped groups tried again. Raises SlimebusError, as where no key of a client is at hand."""
        with connect_without_joining(self.resolved, self.broker, what="page", patience_s=0.0) as client:
            return BufferEditor(client, EDIT_S).edit_all("replay", groups, "asked for on the page")

    def summary(self) -> dict[str, Any]:
        """The status as the page takes it: without the records, and one short row for each process."""
        clients = self.status.get("clients", [])
        rows = [[*(c[name] for name in OF_CLIENT), *(c["metrics"].get(name) for name in OF_METRICS)] for c in clients]
        found = {name: value for name, value in self.status.items() if name not in LEFT_OUT}
        return found | {"problem": self._reason(), "worker_columns": OF_CLIENT + OF_METRICS, "workers": rows}

    def _reason(self) -> str:
        """Why the status is not of now; empty when it is."""
        return "" if self.problem is None else "the run is over" if self.is_over else self.problem.text


class Page:
    """The page of one run. token: what a viewer must show, also on this machine, which others may use too."""

    def __init__(self, resolved: Resolved, broker: str | None, token: str) -> None:
        self.resolved, self.token = resolved, token
        self.live, self.history = Live(resolved, broker), History(resolved.run_dir)
        self.decode = functools.cache(lambda: text_of(resolved))
        self._reader, self._one_asks = ThreadPoolExecutor(1, "read"), asyncio.Lock()
        self._frames: dict[str, bytes] = {}
        self._wanted, self._viewers = asyncio.Event(), set[asyncio.Event]()
        self._shown = -1
        self._asking: asyncio.Task[None] | None = None

    # --- looking ---

    async def follow(self) -> None:
        """Read the records as they grow; ask the broker only while somebody looks."""
        await asyncio.gather(self._follow_records(), self._follow_status())

    async def _follow_records(self) -> None:
        shown_at = 0.0
        while True:
            is_more = await self._read(self.history.read)
            if self._viewers and time.monotonic() - shown_at >= HISTORY_S:
                await self._show_records()
                shown_at = time.monotonic()
            await asyncio.sleep(0.0 if is_more else POLL_S)

    async def _show_records(self) -> None:
        if self._shown != self.history.serial:
            self._shown = self.history.serial
            self._send("history", await self._read(self.history.charts))

    async def _follow_status(self) -> None:
        while True:
            await self._wanted.wait()
            await self._show_status()
            await asyncio.sleep(max(POLL_S, TIMES_ANSWER * self.live.took_s))
            if not self._viewers:
                self._wanted.clear()

    async def show_end(self) -> None:
        """Once more what is on record, and the status that the broker wrote when it ended."""
        if not self._viewers:
            return
        while await self._read(self.history.read):
            continue
        await self._show_records()
        await self._show_status()
        await asyncio.sleep(SENT_S)

    async def _show_status(self) -> None:
        await self.poll()
        self._send("status", self.live.summary() | await self._read(lambda: self.history.remarks(self.live.status)))

    async def poll(self) -> None:
        """Ask the broker now."""
        async with self._one_asks:
            await asyncio.to_thread(self.live.poll)
        await self._read(lambda: self.history.add_pulls(self.live.status.get("clients", [])))

    async def _read(self, work: Callable[[], T]) -> T:
        """Done by the one thread that reads records and store."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    def _send(self, kind: str, what: dict[str, Any]) -> None:
        self._frames[kind] = b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(what))
        for is_newer in self._viewers:
            is_newer.set()

    # --- answering ---

    async def index(self, request: web.Request) -> web.StreamResponse:
        """The page; an address with the token becomes a cookie, and one without."""
        if "token" in request.query:
            seen = web.Response(status=303, headers={"Location": "/"})
            seen.set_cookie(self._cookie(request), request.query["token"], httponly=True, samesite="Strict")
            return seen
        return web.FileResponse(STATIC / "index.html")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The newest status and records whenever there are newer ones; a slow viewer skips some."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
        await response.prepare(request)
        seen, is_newer = dict[str, bytes](), asyncio.Event()
        self._viewers.add(is_newer)
        self._wanted.set()
        try:
            await self._show_records()
            while True:
                is_newer.clear()
                for kind, frame in list(self._frames.items()):
                    if seen.get(kind) is not frame:
                        seen[kind] = frame
                        await response.write(frame)
                try:
                    await asyncio.wait_for(is_newer.wait(), ALIVE_S)
                except TimeoutError:
                    await response.write(b": alive\n\n")
        except ConnectionError:
            return response
        finally:
            self._viewers.discard(is_newer)

    async def groups(self, request: web.Request) -> web.Response:
        """A list of groups."""
        wanted, text = request.query.getall("state", []), request.query.get("text", "")
        if samples.DUMPED in wanted:
            return await self._answer(lambda: samples.list_dumped(self.resolved.run_dir, text))
        states = [state for state in wanted if state in STATES]
        return await self._answer(lambda: self._of_store(lambda store: samples.list_groups(store, states, text)))

    async def group(self, request: web.Request) -> web.Response:
        """One group with its samples."""
        name = request.query.get("id", "")
        if request.query.get("state") == samples.DUMPED:
            return await self._answer(lambda: samples.dumped_detail(self.resolved.run_dir, name, self.decode()))
        return await self._answer(lambda: self._of_store(lambda store: samples.group_detail(store, store.group(name), self.decode())))

    def _of_store(self, ask: Callable[[StoreSnapshot], T]) -> T:
        durability = self.resolved.config.broker.durability
        with open_snapshot(self.resolved.run_dir, durability, is_checked=bool(self.live.problem)) as store:
            return ask(store)

    async def _answer(self, read: Callable[[], Any]) -> web.Response:
        try:
            return _json(await self._read(read))
        except SlimebusError as bad:
            return _json({"problem": bad.text}, 404)

    async def replay(self, request: web.Request) -> web.Response:
        """Try dead letters again, through the run's broker."""
        try:
            wanted = msgspec.json.decode(await request.read(), type=dict[str, list[str]])["groups"]
            done = await asyncio.to_thread(self.live.replay, wanted)
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
            return _json({"problem": 'expected {"groups": [id, ...]}'}, 400)
        except SlimebusError as bad:
            return _json({"problem": bad.text}, 409)
        return _json({"done": done.done, "refused": done.refused})

    async def config(self, request: web.Request) -> web.Response:
        """The config of the run, without secrets."""
        return _json(without_secrets(self.resolved.config))

    async def metrics(self, request: web.Request) -> web.Response:
        """Everything for Prometheus, as of now; with `per=process` each worker's values."""
        from broker.page import metrics  # a page without a scraper starts without it

        await self.poll()
        status, each = self.live.status if not self.live.problem else {}, request.query.get("per") == "process"
        text = metrics.exposition(status, self.history, is_per_process=each)
        return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def probe(self, request: web.Request) -> web.Response:
        """200 while the broker's loop, or the process that is named, works, else 503 and why. The broker is asked as for a viewer."""
        rests_s = min(max(POLL_S, TIMES_ANSWER * self.live.took_s), ANSWER_S / 2)
        if (self._asking is None or self._asking.done()) and time.monotonic() - self.live.answered_at >= rests_s:
            self._asking = asyncio.create_task(self.poll())
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=PROBE_S)
        why = self.live.why_not(request.query.get("name", ""), PROBES[request.path])
        return web.Response(status=503 if why else 200, text=f"{why or 'ok'}\n")

    # --- who may look ---

    def _cookie(self, request: web.Request) -> str:
        return f"slimebus-{_split(f'//{request.host}').port}"

    def _may(self, request: web.Request) -> bool:
        given = request.query.get("token") or request.cookies.get(self._cookie(request), "")
        given = given or request.headers.get("Authorization", "").removeprefix("Bearer ")
        return bool(self.token) and hmac.compare_digest(given.encode(errors="surrogatepass"), self.token.encode())

    def problem_of(self, request: web.Request) -> str:
        """Why a request is refused; empty when it is not. Another site must not get at the page through its viewer's browser."""
        if not self._may(request):
            return "this page needs its token: open the whole address that the broker logged when it started (RUN_DIR/page.url)"
        origin = request.headers.get("Origin")
        if request.method == "POST" and origin and _split(origin).netloc != request.host:
            return "asked by another site"
        if len(request.path) > MAX_PATH:
            return "nothing here has an address so long"
        return ""


def _split(address: str) -> SplitResult:
    """The parts of an address; no parts of what is none."""
    try:
        parts = urlsplit(address)
        _ = parts.port  # raises where that is none
        return parts
    except ValueError:
        return urlsplit("")


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def application(page: Page) -> web.Application:
    """The routes of a page."""

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        if request.path not in PROBES and (problem := page.problem_of(request)):
            return web.Response(status=403, text=problem + "\n", headers=HEADERS)
        try:
            response = await handler(request)
        except web.RequestPayloadError:
            return web.Response(status=400, text="the body of this request cannot be read\n", headers=HEADERS)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    asked = ("events", "groups", "group", "config", "metrics")
    app.add_routes([web.get(f"/{name}", getattr(page, name), allow_head=False) for name in asked])
    app.add_routes([web.get(path, page.probe, allow_head=False) for path in PROBES])
    app.add_routes([web.get("/", page.index), web.post("/replay", page.replay), web.static("/static", STATIC)])
    return app


async def serve(page: Page, listening: socket.socket) -> None:
    """Serve the page until this is cancelled; on SIGTERM, as its broker ends, viewers first get how the run ended."""
    is_over, follows = asyncio.Event(), asyncio.create_task(page.follow())
    follows.add_done_callback(lambda _: is_over.set())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    runner = web.AppRunner(application(page), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        await is_over.wait()
        if follows.done():
            follows.result()  # what ended it
        follows.cancel()
        await page.show_end()
    finally:
        await runner.cleanup()
