"""The page of a run in a real Chromium: what it shows of a run with known figures, and what it outlives."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from browser import Browser
from live_broker import LiveBroker
from made_samples import frames, made
from scripted import LINEAGE, beat, begin, lease, make, publish, take

from slimebus.bus.messages import Commit, GiveBack, Heartbeat
from slimebus.bus.sample_table import check_group
from slimebus.bus.transport.client import Client
from slimebus.client.exported_groups import GROUPS_FILE, arrays_of, write_arrays
from slimebus.view.report import page_url

pytestmark = pytest.mark.integration

STEPS, GROUPS, LOST_S = 3, 2, 30.0
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
LAG_TOKENS = [{"0": 10.0}, {"0": 4.0, "1": 6.0}, {"0": 1.0, "2": 9.0}]


def tokenizer(folder: Path) -> None:
    """Token 0 is hostile; the others are words."""
    from tokenizers import Tokenizer, decoders, models

    folder.mkdir()
    words = [HOSTILE, "two ", "and ", "two ", "make four"]
    made = Tokenizer(models.BPE(vocab={word + str(i) * (i == 3): i for i, word in enumerate(words)}, merges=[]))
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")


class SeededRun:
    """A broker with its page, with this process as trainer and workers, and a browser that looks at it."""

    def __init__(self, folder: Path) -> None:
        tokenizer(folder / "model")
        (folder / "hostile.jsonl").write_text("".join(json.dumps({"prompt": f"{HOSTILE} {i}", "label": "4"}) + "\n" for i in range(40)))
        self.broker = LiveBroker(
            folder,
            broker={"http": "127.0.0.1:0", "max_staleness": 4, "heartbeat_s": 0.5, "lease_s": 60, "max_attempts": 1},
            data={"prompt_data": ["hostile.jsonl"]},
            rollout={"num_rollout": 10, "rollout_batch_size": GROUPS, "n_samples_per_prompt": 1},
            model={"hf_checkpoint": "model"},
            engine={"engine_api_key": "very-secret"},
        )
        self.trainer, self.tokens = self.broker.client("t", "trainer"), 1000.0
        self.browser = Browser(folder / "chromium")
        self.browser.goto(page_url(self.broker.run_dir))
        self.browser.wait_for("state.records")  # of a run without a step
        begin(beat(self.trainer, 0.5))
        self.worker, self.victim = (self._worker(name) for name in ("w1", "w2"))
        self.victim.close(goodbye=False)  # all that the broker sees of a kill -9
        for step in range(STEPS):
            make(self.worker, GROUPS, version=step)
            self.train(step)
        (dead,) = lease(self.worker)
        self.worker.call(GiveBack(group=dead.group, lease=dead.lease, outcome="fail", reason=f"the hook failed: {HOSTILE}"))
        self.dead = dead.group
        self.browser.goto(page_url(self.broker.run_dir))
        self.browser.wait_for(f"state.status?.step === {STEPS} && state.records && state.records.step.length === {STEPS}")

    def _worker(self, name: str) -> Client:
        client = self.broker.client(name, "rollout")
        client.keep_alive(0.5, self._beat, lambda reply: None, lambda problem: None)
        client.call(self._beat())
        return client

    def _beat(self) -> Heartbeat:
        self.tokens += 50
        stages = {"sync_s": 0.5, "sync_wire_s": 0.2, "sync_verify_s": 0.1, "sync_share_s": 0.05, "sync_load_s": 0.15}
        return Heartbeat(state="serving", lineage=LINEAGE, serving=0, metrics={"tokens": self.tokens, **stages})

    def train(self, step: int) -> None:
        assert take(self.trainer, step).groups
        publish(self.trainer, step + 1)
        metrics = {"reward": 0.25 * (step + 1), "wait_s": 1.0, "train_s": 3.0, "publish_s": 0.0, "save_s": 0.0}
        metrics |= {"weights_version": float(step), "weights_copy_s": 0.25, "weights_encode_s": 0.5}
        metrics |= {"loss": -0.5, "grad_norm": 2.0, "entropy": 1.25, "approx_kl": 0.01, "pg_clipfrac": 0.1, "lr": 1e-6}
        metrics |= {"lag/all/ess_sequence": 0.75, "lag/all/ess_token": 0.9}
        metrics |= {f"lag/{lag}/tokens": count for lag, count in LAG_TOKENS[step].items()} if step < len(LAG_TOKENS) else {}
        self.trainer.call(Commit(step=step, checkpoint=0, metrics=metrics))

    def close(self) -> None:
        self.browser.close()
        self.broker.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeededRun]:
    made = SeededRun(tmp_path_factory.mktemp("seen"))
    try:
        yield made
    finally:
        made.close()


def test_each_panel_shows_the_true_figures(run: SeededRun) -> None:
    page = run.browser
    assert page.text("#run") == "live"
    assert page.text("#steps") == "step 3 of 10, version 3"
    assert page.js("state.records.reward") == [0.25, 0.5, 0.75]
    assert page.js("state.records.lags") == {"0": [10.0, 4.0, 1.0], "1": [0.0, 6.0, 0.0], "2": [0.0, 0.0, 9.0]}
    shown = page.js("shares(state.records)")
    assert np.allclose(shown[1:], [[1.0, 0.4, 0.1], [1.0, 1.0, 0.1], [1.0, 1.0, 1.0]])
    page.wait_for("charts['chart-reward'].plot && charts['chart-lag'].plot")
    assert page.js("charts['chart-reward'].plot.data[1]") == [0.25, 0.5, 0.75]
    status = run.broker.status()
    assert {name: page.text(f"#phase-{name} b") for name in ("committed", "dead", "ready")} == {
        name: str(status["groups"][name]) for name in ("committed", "dead", "ready")
    }
    assert page.text("#phase-committed b") == str(STEPS * GROUPS)
    page.wait_for("document.querySelector('#waiting').innerText.startsWith('rollout w2 has been silent for')")
    page.wait_for("document.querySelector('#advice').innerText.startsWith('Fewer than 10 steps are trained')")
    assert page.js("document.querySelectorAll('#advice li').length") == 2
    rows = page.js("[...document.querySelectorAll('#worker-table tbody tr')].map((row) => row.innerText.split('\\t'))")
    found = {row[0]: dict(zip(("name", "role", "state", "version", "lag"), row, strict=False)) for row in rows}
    assert found["w1"] == {"name": "w1", "role": "rollout", "state": "serving", "version": "0", "lag": "3"}
    assert found["t"]["role"] == "trainer"
    page.wait_for("state.status.workers.some((row) => row[0] === 'w1' && row.at(-1) > 50 && row.at(-1) < 200)")  # 50 tokens each 0.5 s
    page.wait_for("document.querySelector('#versions tr:last-child').innerText.includes('0.5 s')")
    versions = page.js("[...document.querySelectorAll('#versions tr')].slice(1).map((row) => row.innerText.split('\\t'))")
    newest, first = versions[0], versions[-1]
    assert [newest[0], newest[2]] == ["2", "0.75"]  # copied and encoded; no worker has it
    assert [first[0], first[2], first[4], first[5]] in (["0", "1.25", "2", "w1 0.5 s"], ["0", "1.25", "2", "w2 0.5 s"])
    page.wait_for("document.querySelector('#config-table').innerText.includes('hostile.jsonl')")
    assert "very-secret" not in page.text("#config-table")
    assert page.errors == []


def test_what_an_optimizer_step_reports_has_charts_over_whole_steps(run: SeededRun) -> None:
    page = run.browser
    shown = {"loss": [-0.5], "grad": [2.0], "entropy": [1.25], "kl": [None, 0.01], "clip": [0.1], "ess": [0.9, 0.75], "lr": [1e-6]}
    for name, values in shown.items():
        page.js(f"document.querySelector('#chart-{name}').scrollIntoView()")
        page.wait_for(f"charts['chart-{name}'].plot")
        assert page.js(f"charts['chart-{name}'].plot.data.slice(1).map((column) => column.at(-1))") == values, name
    assert page.js("charts['chart-loss'].plot.axes[0].incrs().every(Number.isInteger)")
    page.wait_for("document.querySelector('#chart-loss .u-legend').innerText.includes('-0.5')")  # without the mouse
    assert "1e-6" in page.text("#chart-lr .u-legend").replace("\u2212", "-")


def test_tokens_sampled_are_those_of_the_chart_and_not_the_last_reports(run: SeededRun) -> None:
    page = run.browser
    for seen in (0, 0, 99_000):  # workers report in bursts
        page.js(f"state.status.workers.forEach((row) => row[row.length - 1] = {seen}); showTiles()")
        assert page.js("[...document.querySelectorAll('.tile')].find((tile) => tile.innerText.includes('sampled')).innerText").startswith(
            page.js("short(recent(state.records.rollout_tokens_per_s))")
        )


def test_a_setting_that_was_changed_has_its_value_of_now(run: SeededRun) -> None:
    page = run.browser
    page.wait_for("state.status.settings && document.querySelector('#config-table').innerText.includes('max_staleness')")
    page.js("state.status.settings.max_staleness = 3; showConfig()")
    rows = page.js("Object.fromEntries([...document.querySelectorAll('#config-table tr')].map((row) => row.innerText.split('\t')))")
    assert rows["broker.max_staleness"] == "3 (at the start 4)"
    assert rows["rollout.rollout_batch_size"] == str(GROUPS)


def test_hostile_text_is_shown_as_text(run: SeededRun) -> None:
    page = run.browser
    page.click("#group-load")
    page.wait_for("document.querySelector('.tokens')")
    assert HOSTILE in page.text("#group-view .prompt")
    assert page.text(".tokens").startswith(HOSTILE)
    assert page.js("document.querySelectorAll('.tokens span').length") == 5
    assert "version 2" in page.js("document.querySelector('.tokens span').title")
    assert page.js("window.hacked") is None
    assert page.js("document.querySelectorAll('main script, main img').length") == 0
    page.click("input[value=logprob]")
    assert "color-mix" in page.js("document.querySelector('.tokens span').style.background")


def test_samples_that_the_trainer_kept_are_shown(run: SeededRun) -> None:
    folder, group = run.broker.run_dir / "samples" / "step_00000007", check_group(frames(made((2, 5), reward=0.75)))
    folder.mkdir(parents=True)
    write_arrays(arrays_of("0/99", group), folder / "arrays-00000.safetensors")
    (folder / GROUPS_FILE).write_bytes(msgspec.json.encode({"group": "0/99", "table": group.table, "arrays": "arrays-00000.safetensors"}))
    page = run.browser
    page.js("document.querySelector('#group-state').value = 'dumped'")
    page.click("#group-load")
    page.wait_for("document.querySelector('#group-view').innerText.startsWith('0/99: kept, step 7, 1 samples')")
    assert page.text(".tokens").startswith(HOSTILE)
    assert "reward 0.75" in page.text("#group-view")
    assert page.js("window.hacked") is None
    assert page.errors == []


def test_a_dead_letter_is_replayed_from_the_page(run: SeededRun) -> None:
    page = run.browser
    page.click("#dead-load")
    page.wait_for("document.querySelector('#dead-table button')")
    assert HOSTILE in page.text("#dead-table")
    page.click("#dead-table button")
    page.wait_for("document.querySelector('#dead-said').innerText === '1 queued again'")
    assert run.broker.status()["moves"]["dead>queued replayed"] == 1
    assert page.text("#dead-table") == "no dead letters"
    assert page.errors == []
    assert page.js("window.hacked") is None


def test_keys_themes_and_a_phone(run: SeededRun, tmp_path: Path) -> None:
    page = run.browser
    page.js("setTheme('light')")
    page.press("t")
    assert page.js("document.documentElement.dataset.theme") == "dark"
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
    page.press("6")
    assert page.js("document.activeElement.id") == "workers"
    page.press("/")
    assert page.js("document.activeElement.id") == "worker-filter"
    page.js("document.activeElement.blur()")
    page.resize(390, 844, is_phone=True)
    page.wait_for("document.documentElement.scrollWidth <= 390")
    page.resize(1400, 1000)
    page.photograph(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_the_page_outlives_a_killed_broker(run: SeededRun) -> None:
    page = run.browser
    url, asked = page_url(run.broker.run_dir), page.js("window.loaded = 1")
    run.broker.kill()
    page.wait_for("!document.querySelector('#problem').hidden")
    assert (page.text("#state"), page.text("#eta")) == ("no answer", "")
    assert "running" not in page.js("document.querySelector('#state').className")
    assert page.text("#waiting") == "not known: the broker does not answer"
    run.broker.start()
    page.wait_for("document.querySelector('#problem').hidden && state.status.step === 3")
    assert page_url(run.broker.run_dir) == url
    make(run.worker, GROUPS, version=3)
    run.train(STEPS)
    page.wait_for(f"state.records.step.length === {STEPS + 1}")
    assert page.js("window.loaded") == asked  # it was not loaded anew


def test_a_killed_worker_is_lost_within_its_deadline(run: SeededRun) -> None:
    page = run.browser
    page.wait_for("[...document.querySelectorAll('tr.lost')].some((row) => row.innerText.startsWith('w2'))", 2 * LOST_S)
    assert page.js("document.querySelector('#worker-table tbody tr').innerText").startswith("w2")  # what is lost comes first
    assert "1 · 1" in page.text("#tiles")


def test_an_open_page_shows_how_the_run_ended(run: SeededRun) -> None:
    page = run.browser
    row = {"evaluation": "k", "dataset": "held", "version": 4, "step": 4, "mean_reward": 0.986, "low": 0.9, "high": 1.0, "done": True}
    with (run.broker.run_dir / "metrics" / "broker.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    run.broker.process.terminate()
    page.wait_for("state.records.evaluations.some((row) => row.mean_reward === 0.986)")
    page.js("state.status.state = 'finished'; showStatus(); showLost()")
    assert (page.text("#state"), page.text("#problem")) == ("finished", "the run is over")
    assert page.js("document.querySelector('#problem').className") == "over"
