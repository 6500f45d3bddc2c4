"""What Prometheus reads of a run."""

import re
from pathlib import Path
from typing import Any

import pytest

from broker.page.history import History
from slimebus.bus import messages as m

TRAINER = (("process", "trainer"),)


def parsed(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    families = parser.text_string_to_metric_families(text.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def exposition(status: dict[str, Any], history: History, **how: bool) -> bytes:
    pytest.importorskip("prometheus_client")
    from broker.page import metrics

    return metrics.exposition(status, history, **how)


def test_everything_of_a_run_is_exported_under_the_names_of_its_group(begun_desk: Any, tmp_path: Path) -> None:
    desk = begun_desk()
    desk.join('w"1', "rollout")
    desk.ask('w"1', m.Heartbeat(state="serving", metrics={"tokens": 7.0, "sync_s": 0.5}))
    history = History(tmp_path)
    history._add_step({"step": 0, "metrics": {"loss": 0.25, "lag/3-4/ess_token": 0.5, "weights_copy_s": 0.1, "odd": float("nan")}})
    history.evaluations["held", 0] = {"mean_reward": 0.75, "version": 0}
    found = parsed(exposition(desk.status, history, is_per_process=True))
    assert found["slimebus_broker_up", ()] == 1.0
    assert found["slimebus_rollout_tokens", (("process", 'w"1'),)] == 7.0
    assert found["slimebus_weights_sync_s", (("process", 'w"1'),)] == 0.5
    assert found["slimebus_broker_silent_seconds", (("process", 'w"1'), ("role", "rollout"))] == 0.0
    assert found["slimebus_broker_groups", (("phase", "queued"),)] == 0.0
    assert found["slimebus_broker_bounds_hits", (("bound", "max_clients"),)] == 0.0
    assert found["slimebus_weights_copy_s", TRAINER] == 0.1
    assert found["slimebus_train_loss", TRAINER] == 0.25
    assert found["slimebus_train_lag_ess_token", (("lag", "3-4"), *TRAINER)] == 0.5
    assert found["slimebus_eval_mean_reward", (("dataset", "held"),)] == 0.75
    assert not [name for name, _ in found if "odd" in name]


def test_of_workers_there_are_sums_and_quantiles_however_many_they_are(tmp_path: Path) -> None:
    about = {"role": "rollout", "state": "serving", "version": 3}
    clients = [{"name": f"w{i}", **about, "silent_s": float(i), "metrics": {"tokens": 10.0 * i, "sync_s": 1.0}} for i in range(101)]
    clients += [{"name": "critic", "role": "consumer", "state": "", "version": -1, "silent_s": 0.5, "metrics": {"loss": 0.25}}]
    clients += [{**clients[0], "name": "left", "state": "gone", "silent_s": 900.0}]
    found = parsed(exposition({"clients": clients}, History(tmp_path)))
    assert found["slimebus_rollout_tokens_sum", ()] == 50_500.0
    assert {q: found["slimebus_rollout_tokens", (("quantile", q),)] for q in ("0", "0.5", "0.9", "1")} == {
        "0": 0.0, "0.5": 500.0, "0.9": 900.0, "1": 1000.0,
    }  # fmt: skip
    assert found["slimebus_weights_sync_s_sum", ()] == 101.0
    assert found["slimebus_broker_silent_seconds", (("quantile", "1"), ("role", "rollout"))] == 100.0
    assert found["slimebus_consumer_loss", (("process", "critic"),)] == 0.25
    assert len(found) < 40
    each = parsed(exposition({"clients": clients}, History(tmp_path), is_per_process=True))
    assert each["slimebus_rollout_tokens", (("process", "w7"),)] == 70.0
    assert not [labels for _, labels in each if "quantile" in dict(labels)]


def test_a_metric_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    metrics = {"huge": 10**400, "odd\ud800": 1.0, "lag/\ud800/loss": 1.0, "tokens": 5.0}
    client = {"name": "w1", "role": "rollout", "state": "", "version": 0, "silent_s": 0.0, "metrics": metrics}
    names = {name for name, _ in parsed(exposition({"clients": [client]}, History(tmp_path), is_per_process=True))}
    assert "slimebus_rollout_tokens" in names
    assert not {"huge", "odd", "loss"} & set(" ".join(names).replace("_", " ").split())


def test_a_full_disk_and_a_broken_allow_list_are_problems(tmp_path: Path) -> None:
    store = {"path": "/run", "free_bytes": 5, "problem": "the disk is full"}
    status = {"store": store, "security": {"problem": ""}, "refused": {"unknown key": 3}}
    found = parsed(exposition(status, History(tmp_path)))
    assert {labels: value for (name, labels), value in found.items() if name == "slimebus_broker_problem"} == {
        (("of", "store"),): 1.0,
        (("of", "security"),): 0.0,
    }
    assert found["slimebus_broker_store_free_bytes", ()] == 5.0
    assert found["slimebus_broker_refused", (("reason", "unknown key"),)] == 3.0


def test_without_its_broker_a_run_is_down_and_what_is_on_record_stays(tmp_path: Path) -> None:
    assert parsed(exposition({}, History(tmp_path))) == {("slimebus_broker_up", ()): 0.0, ("slimebus_broker_stalled_seconds", ()): 0.0}


def test_a_metric_of_one_name_may_have_labels_or_none(tmp_path: Path) -> None:
    history = History(tmp_path)
    history._add_step({"step": 0, "metrics": {"lag_mean": 1.5, "lag/all/mean": 2.5}})
    found = parsed(exposition({}, history))
    assert found["slimebus_train_lag_mean", TRAINER] == 1.5
    assert found["slimebus_train_lag_mean", (("lag", "all"), *TRAINER)] == 2.5


def test_each_name_of_the_broker_and_of_evaluations_is_documented(begun_desk: Any, tmp_path: Path) -> None:
    desk = begun_desk()
    desk.join("w1", "rollout")
    history = History(tmp_path)
    history.evaluations["held", 0] = dict.fromkeys(("mean_reward", "low", "high", "version", "num_samples", "num_failed"), 1)
    status = desk.status | {"waste": {"stale": {"groups": 1, "tokens": 1}}, "counted": {"x": 1}, "moves": {"x": 1}}
    status |= {"store": dict.fromkeys(("size_bytes", "used_bytes", "free_bytes", "unwritten_s"), 1), "security": {}, "refused": {"busy": 1}}
    status["lag"] = status["lag"] | {"histogram": {"1": 1}}
    names = {name for name, _ in parsed(exposition(status, history)) if name.startswith(("slimebus_broker", "slimebus_eval"))}
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text().partition("## The run")[2]
    assert names == set(re.findall(r"`(slimebus_\w+)`", text))
