"""What a real run shows of itself: its metrics at each process, its samples, its spans, its evaluations."""

import json
import signal
import struct
import sys
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from collector import Collector
from live_run import Run
from promql import expressions, label_names, metric_names

from slimebus.client.exported_groups import read_groups
from slimebus.view import trace
from slimebus.view.report import page_url

pytestmark = pytest.mark.integration

HOOKS = """
import asyncio
import itertools

made = itertools.count(1)

async def generate(session):
    await session.generate(max_new_tokens=4)
    await asyncio.sleep(0.02)
    session.observe([3, 4])
    await session.generate(max_new_tokens=4)

def keep(samples):
    return next(made) % 3 > 0
"""
KEPT, SAMPLES_A_GROUP, GROUPS_A_STEP = 40, 4, 4


class Seen:
    """A run, what its page exported while it went on, by the query, and the spans that its collector got."""

    def __init__(self, run: Run, collector: Collector) -> None:
        self.run, self.collector = run, collector
        self.exported: dict[str, str] = {}

    def scrape(self) -> None:
        for query in ("", "?per=process"):
            url = page_url(self.run.run_dir).replace("/?", f"/metrics{query}{'&' if query else '?'}")
            with urllib.request.urlopen(url, timeout=30) as answer:
                self.exported[query] = answer.read().decode()


@pytest.fixture(scope="module")
def seen(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("seen")
    (folder / "hooks.py").write_text(HOOKS)
    sets = {"held": {"path": f"{task}/heldout.jsonl@[0:4]", "max_response_len": 4}}
    config = {"rollout__custom_generate_function_path": "hooks.py:generate", "rollout__dynamic_sampling_filter_path": "hooks.py:keep"}
    config |= {"rollout__num_rollout": 2000, "broker__http": "127.0.0.1:0", "eval": {"datasets": sets, "eval_interval": 2}}
    config |= {f"trainer__{name}": value for name, value in {"dump_samples": KEPT, "tensorboard": True, "wandb": True}.items()}
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("WANDB_MODE", "offline")
        with Run(folder, task, **config) as run:
            found = Seen(run, collector)
            processes = [run.start("broker"), run.start("trainer", is_forked=False), run.start("rollout", name="w1", is_forked=False)]
            run.wait_for("an evaluation", lambda s: s["step"] >= 5 and sum(e["done"] for e in s["evaluations"]) >= 2)
            found.scrape()
            for process in reversed(processes):
                process.expected |= {130, 0}
                process.send(signal.SIGINT)
                assert process.wait(60) in (0, 130), process.tail()
            yield found


def test_the_page_exports_what_all_processes_report(seen: Seen) -> None:
    for line in (
        'slimebus_train_reward{process="trainer"}',
        'slimebus_train_memory_bytes{process="trainer"}',
        "slimebus_rollout_tokens_sum ",
        'slimebus_rollout_memory_bytes{quantile="1"}',
        'slimebus_eval_mean_reward{dataset="held"}',
    ):
        assert line in seen.exported[""]
    assert 'slimebus_rollout_cpu_s{process="w1"}' in seen.exported["?per=process"]


def test_every_query_of_the_dashboard_and_the_alerts_names_metrics_that_are_exported(seen: Seen) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    samples = [s for text in seen.exported.values() for family in text_string_to_metric_families(text) for s in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    for title, expression in expressions().items():
        for name in metric_names(expression):
            assert name in labels, f"{title}: {name} is not exported"
        known = set().union(*(labels[name] for name in metric_names(expression)))
        assert label_names(expression) <= known, f"{title}: of these labels the metrics have {known}"


def test_the_newest_trained_samples_are_kept_and_trained_again(seen: Seen) -> None:
    folders = sorted((seen.run.run_dir / "samples").iterdir())
    assert len(folders) == KEPT // (SAMPLES_A_GROUP * GROUPS_A_STEP)
    steps = [json.loads((folder / "batches.jsonl").read_text()) for folder in folders]
    assert [step["groups"] for step in steps] == [seen.run.trained()[step["step"]]["groups"] for step in steps]
    assert all(group.num_samples == SAMPLES_A_GROUP for folder in folders for group in read_groups(folder))
    done = seen.run.start("trainer", "--replay", str(folders[0].parent))
    done.ends(0)
    replayed = [json.loads(line)["step"] for line in (seen.run.run_dir / "replay" / "trainer.jsonl").read_text().splitlines()]
    assert replayed == [step["step"] for step in steps]


def test_a_step_is_one_trace_of_the_life_of_each_sample(seen: Seen) -> None:
    out = seen.run.folder / "step.json"
    done = seen.run.command("trace", [sys.executable, "-m", "slimebus", "trace", str(seen.run.run_dir), "--step", "3", "--out", str(out)])
    done.ends(0, 60)
    events = json.loads(out.read_text())["traceEvents"]
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "samples of step 3")
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    assert len(set(lanes.values())) == SAMPLES_A_GROUP * GROUPS_A_STEP
    first = sorted((e for e in events if e["ph"] == "X" and e["args"].get("sample") == next(iter(lanes.values()))), key=lambda e: e["ts"])
    named = [e["name"] for e in first]
    assert (named[0], named[-5:]) == ("queue", ["reward", "put", "ready", "assigned", "trained"])
    turns = ["generate", "tool", "generate"]
    assert named[1:-5] in (turns, ["tool", *turns]), "a loaded machine may take a while to begin the first turn"
    assert {e["args"]["by"] for e in first} == {"broker", "w1"}
    ends = [e["ts"] + e["dur"] for e in first]
    assert all(after > before - 1 for before, after in pairwise(ends)), "but for the microsecond that a float of seconds since 1970 can err"
    spans = trace.read([seen.run.run_dir])
    (trained,) = [s for s in spans if s.name == "train" and s.about["step"] == 3]
    by_broker = next(s for s in trace.sample_lives(spans, 3) if s.name == "trained")
    assert abs(by_broker.begin - trained.begin) < max(0.2, trained.seconds), "the broker's view of the step is the trainer's"


def test_spans_of_all_processes_reach_the_collector_as_one_trace_a_group(seen: Seen) -> None:
    sent = seen.collector.spans
    assert {process for process, _ in sent} == {"broker", "trainer", "w1"}
    group = seen.run.trained()[3]["groups"][0]
    of_group = [(process, span) for process, span in sent if any(a.value.string_value == group for a in span.attributes)]
    assert {(process, span.name) for process, span in of_group} >= {
        *(("w1", name) for name in ("sample", "generate", "reward", "put")),
        *(("broker", name) for name in ("queue", "lease", "ready", "assigned", "trained")),
    }
    assert len({span.trace_id for _, span in of_group}) == 1
    assert len({span.trace_id for _, span in sent}) > 4


def test_evaluations_are_in_tensorboard_and_in_wandb(seen: Seen) -> None:
    metrics = seen.run.run_dir / "metrics"
    rows = {row["step"]: row["mean_reward"] for row in seen.run.rows("broker") if "evaluation" in row and row["mean_reward"] is not None}
    assert tensorboard(metrics / "tensorboard" / "trainer", "eval/held/mean_reward") == pytest.approx(rows)
    assert wandb_history(metrics / "wandb", "eval/held/mean_reward") == pytest.approx(rows)


def tensorboard(folder: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {event.step: event.value for event in read.Scalars(tag)}


def wandb_history(folder: Path, name: str) -> dict[int, float]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("offline-run-*/run-*.wandb")
    found = dict[int, float]()
    for payload in leveldb_records(file.read_bytes()):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in Record.FromString(payload).history.item}
        if name in items:
            found[items["step"]] = items[name]
    return found


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB (its doc/log_format.md) behind the 7 bytes of W&B's own header."""
    at, record, block, head = 7, b"", 32768, 7
    while at + head <= len(log):
        left = block - at % block
        _, length, kind = struct.unpack_from("<IHB", log, at)
        if left < head or not kind:
            at += left
            continue
        record = (record if kind in (3, 4) else b"") + log[at + head : at + head + length]
        at += head + length
        if kind in (1, 4):
            yield record
