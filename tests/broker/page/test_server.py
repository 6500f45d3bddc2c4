"""Who may see the page, and what its answers carry."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientTimeout
from made_samples import frames, made

from broker.page.process import listen, token_of
from broker.store.lmdb_store import LmdbStore
from slimebus.bus.errors import DataError, UsageError
from slimebus.bus.sample_table import check_group
from slimebus.client.exported_groups import arrays_of, write_arrays
from slimebus.config import resolve
from slimebus.config.saved import save_config, saved_config
from slimebus.view.report import page_url


@pytest.fixture
def visited(tmp_path: Path) -> Callable[..., Any]:
    """Calls a coroutine with a client of a page of an empty run, which shows the page's token unless it is told not to."""
    run_dir = tmp_path / "run"
    (run_dir / "metrics").mkdir(parents=True)
    save_config(resolve(None, {"run_dir": str(run_dir), "name": "r", "engine.engine_api_key": "hush"}, {}))

    def visit(ask: Callable[[Any], Coroutine[Any, Any, Any]], *, token: str = "s3cret", shows_token: bool = True) -> Any:
        from aiohttp import CookieJar
        from aiohttp.test_utils import TestClient, TestServer

        from broker.page.server import Page, application

        async def run() -> Any:
            page = Page(saved_config(run_dir), None, token)
            headers = {"Authorization": f"Bearer {token}"} if shows_token else {}
            async with TestClient(TestServer(application(page)), cookie_jar=CookieJar(unsafe=True), headers=headers) as client:
                return await ask(client)

        return asyncio.run(run())

    return visit


def test_every_answer_forbids_foreign_scripts(visited: Any) -> None:
    async def ask(client: Any) -> list[str]:
        return [(await client.get(path)).headers["Content-Security-Policy"] for path in ("/", "/static/page.js", "/config", "/groups")]

    for policy in visited(ask):
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize("host", ["[", "localhost:99999", "127.0.0.1:abc", "[::1"])
def test_what_is_no_address_is_refused(visited: Any, host: str) -> None:
    async def without_token(client: Any) -> int:
        return int((await client.get("/config", headers={"Host": host})).status)

    async def from_there(client: Any) -> int:
        return int((await client.post("/replay", headers={"Origin": f"http://{host}"})).status)

    assert visited(without_token, shows_token=False) == 403
    assert visited(from_there) == 403


def test_a_page_that_lost_its_token_shows_nothing(visited: Any) -> None:
    async def ask(client: Any) -> list[int]:
        return [(await client.get(path)).status for path in ("/", "/config", "/config?token=")]

    assert visited(ask, token="", shows_token=False) == [403] * 3


def test_a_token_of_odd_bytes_is_refused(visited: Any) -> None:
    async def ask(client: Any) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"GET /config HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.split(b"\r\n")[0]

    assert visited(ask, shows_token=False) in (b"HTTP/1.1 403 Forbidden", b"HTTP/1.1 400 Bad Request")


def test_another_site_cannot_replay_through_a_viewers_browser(visited: Any) -> None:
    async def ask(client: Any) -> list[int]:
        own = f"http://127.0.0.1:{client.port}"
        how = {"data": json.dumps({"groups": ["0/1"]})}
        return [(await client.post("/replay", headers={"Origin": origin}, **how)).status for origin in ("http://evil.example", "null", own)]

    assert visited(ask) == [403, 403, 409]  # 409: no broker runs


def test_the_token_is_asked_for_and_becomes_a_cookie(visited: Any) -> None:
    async def ask(client: Any) -> list[int]:
        paths = ("/", "/static/page.js", "/events", "/metrics", "/config", "/?token=wrong")
        refused = [(await client.get(path)).status for path in paths]
        bearer = (await client.get("/config", headers={"Authorization": "Bearer s3cret"})).status
        first = await client.get("/?token=s3cret", allow_redirects=False)
        assert "s3cret" not in first.headers["Location"]
        assert "HttpOnly" in first.headers["Set-Cookie"]
        assert "SameSite=Strict" in first.headers["Set-Cookie"]
        return [*refused, bearer, first.status, (await client.get("/config")).status]

    assert visited(ask, shows_token=False) == [403] * 6 + [200, 303, 200]


def test_probes_alone_ask_for_no_token_and_say_that_no_broker_answers(visited: Any) -> None:
    async def ask(client: Any) -> list[tuple[int, str]]:
        answers = [await client.get(path, headers={"Host": "node7:8080"}) for path in ("/healthz", "/readyz", "/readyz?name=w1")]
        return [(answer.status, await answer.text()) for answer in answers]

    assert visited(ask, shows_token=False) == [(503, "the broker has not answered yet\n")] * 3


def test_secrets_of_the_config_are_not_shown(visited: Any) -> None:
    async def ask(client: Any) -> str:
        return str(await (await client.get("/config")).text())

    assert "hush" not in visited(ask)
    assert json.loads(visited(ask))["engine"]["engine_api_key"] == "..."


def test_what_cannot_be_answered_says_why(visited: Any) -> None:
    async def ask(client: Any) -> list[tuple[int, str]]:
        answers = [await client.get("/group?id=0/1"), await client.post("/replay", data=b"\xff"), await client.post("/replay", data=b"{}")]
        return [(answer.status, (await answer.json())["problem"]) for answer in answers]

    (missing, why), (bad, expected), (empty, _) = visited(ask)
    assert (missing, bad, empty) == (404, 400, 400)
    assert "no store under" in why
    assert "expected" in expected


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        ("GET", "/group", {}, 404),
        ("GET", "/static/" + "a" * 4000, {}, 403),
        ("HEAD", "/events", {}, 405),
        ("POST", "/replay", {"data": b"abc", "headers": {"Content-Encoding": "gzip"}}, 400),
    ],
    ids=["no id", "long name", "head of events", "no gzip"],
)
def test_an_odd_request_is_refused_and_no_error_of_the_page(
    method: str, path: str, more: Any, status: int, visited: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LmdbStore(tmp_path / "run" / "broker", is_synced=False).close()

    async def ask(client: Any) -> int:
        async with client.request(method, path, timeout=ClientTimeout(2.0), **more) as answer:
            return int(answer.status)

    assert visited(ask) == status
    assert "Error handling request" not in caplog.text


def test_the_port_and_token_of_an_earlier_process_are_taken_again(closing: Any) -> None:
    first, url = listen("127.0.0.1:0")
    first.close()
    second, again = listen("127.0.0.1:0", url)
    closing(second)
    assert again == url
    third, other = listen("127.0.0.1:0", url)  # it is in use now: another is taken
    closing(third)
    assert other != url
    with pytest.raises(UsageError, match="give another --http"):
        listen(f"127.0.0.1:{second.getsockname()[1]}")
    public, address = listen("0.0.0.0:0")
    closing(public)
    assert len(token_of(address)) >= 32
    assert len(token_of(url)) >= 32


@pytest.mark.parametrize("kept", [b"http://127.0.0.1:99999/", b"http://127.0.0.1:x/", b"\xff\xfe", b"http://[::1/"])
def test_a_damaged_address_of_before_is_as_none(tmp_path: Path, kept: bytes) -> None:
    (tmp_path / "page.url").write_bytes(kept)
    assert page_url(tmp_path) == ""


def test_a_folder_that_is_no_run_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run directory"):
        saved_config(tmp_path)
    (tmp_path / "config.json").write_text('{"base": "/", "config": {"nmae": 1}}')
    with pytest.raises(DataError, match="nmae"):
        saved_config(tmp_path)


def test_a_saved_config_is_read_back(tmp_path: Path) -> None:
    made = resolve(None, {"run_dir": str(tmp_path), "broker.max_staleness": float("inf"), "megatron.weight_decay": 0.1}, {})
    save_config(made)
    found = saved_config(tmp_path)
    assert found.config == made.config
    assert found.base == Path.cwd()


def test_samples_that_the_trainer_kept_are_shown_without_a_store(visited: Any, tmp_path: Path) -> None:
    for step in (8, 9):
        folder = tmp_path / "run" / "samples" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        group = check_group(frames(made((3, 4), reward=0.5), made((3, 4), reward=1.0)))
        write_arrays(arrays_of(f"0/{step}", group), folder / "arrays-00000.safetensors")
        line = msgspec.json.encode({"group": f"0/{step}", "table": group.table, "arrays": "arrays-00000.safetensors"})
        (folder / "groups.jsonl").write_bytes(b'{"gro\n\n' + line if step == 9 else line)

    for name, lines in (("step_notes", b""), ("step_00000010", b'{"gro'), ("step_00000007", b'{"group":"\xff"}'), ("step_00000011", None)):
        folder = tmp_path / "run" / "samples" / name
        folder.mkdir()
        if lines is not None:
            (folder / "groups.jsonl").write_bytes(lines)

    async def ask(client: Any) -> list[Any]:
        paths = ("/groups?state=dumped&text=", "/groups?state=dumped&text=0/8", "/group?id=0/9&state=dumped", "/group?id=0/7&state=dumped")
        return [await (await client.get(path)).json() for path in paths]

    listed, found, whole, absent = visited(ask)
    assert [(group["group"], group["step"], group["num_samples"]) for group in listed] == [("0/9", 9, 2), ("0/8", 8, 2)]
    assert [group["reason"] for group in listed] == ["1 of the 2 lines of its step are damaged and left out", ""]
    assert [group["group"] for group in found] == ["0/8"]
    assert [sample["reward"] for sample in whole["samples"]] == [0.5, 1.0]
    assert whole["samples"][0]["num_tokens"] == 4
    assert "not kept any more" in absent["problem"]


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not share cores by sessions")
@pytest.mark.parametrize("is_apart", [True, False])
def test_the_page_lowers_its_own_session_and_no_other(is_apart: bool) -> None:
    code = "from broker.page.cli import lower_priority; lower_priority(); print(open('/proc/self/autogroup').read())"
    before = Path("/proc/self/autogroup").read_text()
    done = subprocess.run([sys.executable, "-c", code], start_new_session=is_apart, capture_output=True, text=True, check=True)
    assert ("nice 10" in done.stdout) is is_apart, done.stdout
    assert Path("/proc/self/autogroup").read_text() == before
