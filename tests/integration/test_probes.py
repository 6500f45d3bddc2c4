"""What a probe of Kubernetes is answered by the page of a real broker: about its loop, and about a process that is named."""

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from live_broker import LiveBroker
from scripted import beat
from waiting import has_ended, wait_until

from slimebus.view.report import page_url

pytestmark = pytest.mark.integration


class Probed:
    """A broker and its page, asked without its token."""

    def __init__(self, folder: Path) -> None:
        self.live = LiveBroker(folder, broker={"http": "127.0.0.1:0", "heartbeat_s": 0.3})
        self.url = wait_until("address of the page", lambda: page_url(self.live.run_dir)).partition("?")[0]

    def probe(self, path: str) -> tuple[int, str]:
        """Status and text; 0 while nothing answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as answer:
                return answer.status, answer.read().decode().strip()
        except urllib.error.HTTPError as bad:
            return bad.code, bad.read().decode().strip()
        except (urllib.error.URLError, ConnectionError):
            return 0, ""

    def wait_for(self, path: str, status: int) -> str:
        return wait_until(f"{status} of {path}", lambda: next((t for s, t in [self.probe(path)] if s == status), ""), every_s=0.2)

    @property
    def page(self) -> psutil.Process:
        (found,) = [p for p in psutil.Process(self.live.process.pid).children() if "view" in p.cmdline()]
        return found


@pytest.fixture
def probed(tmp_path: Path) -> Iterator[Probed]:
    one = Probed(tmp_path)
    try:
        yield one
    finally:
        one.live.close()


def test_a_broker_is_ready_while_its_loop_turns_and_healthy_a_while_longer(probed: Probed) -> None:
    assert probed.wait_for("readyz", 200) == "ok"
    probed.live.process.send_signal(signal.SIGSTOP)
    assert "last answered" in probed.wait_for("readyz", 503)
    assert probed.probe("healthz") == (200, "ok")
    probed.live.process.send_signal(signal.SIGCONT)
    assert probed.wait_for("readyz", 200) == "ok"


def test_a_process_is_ready_once_it_has_joined_and_loaded(probed: Probed) -> None:
    probed.wait_for("readyz", 200)
    assert probed.wait_for("readyz?name=w1", 503) == "no process 'w1' is listed in the run's status"
    worker = beat(probed.live.client("w1", "rollout"), 0.3, state="starting: loads its model")
    assert probed.wait_for("readyz?name=w1", 503)
    wait_until("a worker that starts", lambda: probed.probe("readyz?name=w1") == (503, "w1 is starting"), every_s=0.2)
    beat(worker, 0.3, state="serving")
    assert probed.wait_for("readyz?name=w1", 200) == "ok"


def test_a_page_that_was_killed_is_started_again_and_goes_first_where_memory_is_short(probed: Probed) -> None:
    probed.wait_for("readyz", 200)
    for _ in range(2):
        page = probed.page
        assert Path(f"/proc/{page.pid}/oom_score_adj").read_text().strip() == "500"
        page.kill()
        wait_until("end of the page", lambda pid=page.pid: has_ended(pid))
        assert probed.wait_for("readyz", 200) == "ok"
    assert "the page's process ended (exit code -9)" in probed.live.log.read_text()
    page = probed.page
    probed.live.process.send_signal(signal.SIGTERM)
    assert probed.live.process.wait(20) == 0
    wait_until("end of the page", lambda: has_ended(page.pid))
