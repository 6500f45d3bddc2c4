"""A process's own /metrics."""

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimebus.bus.errors import UsageError
from slimebus.config import resolve
from slimebus.security.http_address import read_address, token_of
from slimebus.telemetry import exporter
from slimebus.telemetry.exporter import MetricsServer


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """Serves these metrics of worker w1 with this config, until the test ends."""
    opened: list[MetricsServer] = []

    def start(metrics: dict[str, float], process: str = "w1", http: str = "127.0.0.1:0", **config: Any) -> MetricsServer:
        resolved = resolve(None, {"run_dir": str(tmp_path), "name": "r", "broker.http": http, **config}, {})
        opened.append(MetricsServer(resolved, "rollout", process, lambda: metrics))
        return opened[-1]

    yield start
    for server in opened:
        server.close()


def text_of(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
        return str(answer.read().decode())


def status_of(url: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        text_of(url)
    refused.value.close()
    return int(refused.value.code)


def test_a_process_serves_its_newest_metrics_and_its_memory(serve: Any, tmp_path: Path) -> None:
    metrics = {"tokens": 5.0, "sync_s": 0.5, "odd": float("nan")}
    server = serve(metrics)
    assert read_address(tmp_path / "metrics" / "w1.url") == server.url
    assert 'slimebus_rollout_tokens{process="w1"} 5.0' in text_of(server.url)
    metrics["tokens"] = 9.0
    text = text_of(server.url)
    assert 'slimebus_rollout_tokens{process="w1"} 9.0' in text
    assert 'slimebus_weights_sync_s{process="w1"} 0.5' in text
    assert "process_resident_memory_bytes" in text
    assert "odd" not in text
    assert status_of(server.url.replace("/metrics", "/")) == 404


def test_beyond_this_machine_it_needs_keys_and_its_token(serve: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can be reached from other machines"):
        serve({}, http="0.0.0.0:0")
    server = serve({"tokens": 1.0}, http="0.0.0.0:0", **{"security.insecure": True})
    token, port = token_of(server.url), server.url.partition("/metrics")[0].rpartition(":")[2]
    here = f"http://127.0.0.1:{port}/metrics"
    assert len(token) > 20
    assert (tmp_path / "metrics" / "w1.url").stat().st_mode & 0o777 == 0o600
    assert status_of(here) == 403
    assert status_of(f"{here}?token=wrong") == 403
    assert "slimebus_rollout_tokens" in text_of(f"{here}?token={token}")
    assert "slimebus_rollout_tokens" in text_of(here, Authorization=f"Bearer {token}")


def test_processes_of_one_config_take_ports_one_after_the_other(serve: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    first, second = serve({}, http=address), serve({}, "w2", http=address)
    ports = [int(server.url.removesuffix("/metrics").rpartition(":")[2]) for server in (first, second)]
    assert port < ports[0] < ports[1] <= port + 64, "the first is the broker's page's"


def test_an_empty_address_serves_nothing(serve: Any, tmp_path: Path) -> None:
    serve({}, http="").close()
    assert not list(tmp_path.iterdir())


def test_a_closed_server_has_let_go_of_its_address(serve: Any) -> None:
    server = serve({})
    server.close()
    with pytest.raises(urllib.error.URLError):
        text_of(server.url)
    assert serve({}).url == server.url, "the next process of the name takes the same port"


@pytest.mark.parametrize("http", ["192.0.2.1:9100", f"{'x' * 64}.invalid:9100", "[zz]:0"])
def test_an_address_that_cannot_be_served_is_a_warning(serve: Any, http: str, caplog: pytest.LogCaptureFixture) -> None:
    serve({}, http=http, **{"security.insecure": True}).close()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert http in said
    assert "broker.http" in said


def test_a_name_that_does_not_resolve_is_a_warning_and_asked_for_once(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []

    def unknown(address: Any, **_: Any) -> None:
        asked.append(address)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_server", unknown)
    serve({}, http="node-7:9100", **{"security.insecure": True})
    assert asked == [("node-7", 9101)]
    assert "cannot listen at node-7:9100: Name or service not known" in caplog.text


def test_ports_that_are_all_taken_are_a_warning(serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(exporter, "NUM_PORTS", 1)
    first = serve({})
    port = int(first.url.removesuffix("/metrics").rpartition(":")[2])
    assert serve({}, "w2", http=f"127.0.0.1:{port - 1}").url == ""
    assert "broker.http" in caplog.text


@pytest.mark.parametrize("kept", [b"http://127.0.0.1:99999/metrics", b"http://127.0.0.1:x/", b"\xff\xfe", b"http://[::1/"])
def test_a_damaged_address_of_before_is_as_none(serve: Any, tmp_path: Path, kept: bytes) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "w1.url").write_bytes(kept)
    server = serve({"tokens": 1.0})
    assert "slimebus_rollout_tokens" in text_of(server.url)
    assert read_address(tmp_path / "metrics" / "w1.url") == server.url


def test_a_metric_that_cannot_be_written_is_left_out(serve: Any) -> None:
    server = serve({"huge": 10**400, "odd\ud800": 1.0, "lag/\ud800/loss": 1.0, "tokens": 5.0})
    text = text_of(server.url)
    assert 'slimebus_rollout_tokens{process="w1"} 5.0' in text
    assert not {"huge", "odd", "loss"} & set(text.replace("_", " ").split())
