"""The watchdog: when a run counts as stalled, and whom the sentence names."""

from typing import Any

import pytest

from broker.state.effects import Note
from broker.state.rules import HeldOutSet
from slimebus.bus import messages as m

STEP_S = 20.0
PATIENT = {"max_staleness": 4, "client_timeout_s": 1000.0, "lease_s": 1000.0, "stall_min_s": 10.0}


@pytest.fixture
def running(new_desk: Any) -> Any:
    """A run that has trained a step each 20 s, whose trainer now waits for batch 5: limit 80 s."""
    return trained(new_desk(**PATIENT))


def trained(desk: Any, steps: int = 5) -> Any:
    desk.begin()
    for step in range(steps):
        desk.fill(2, step)
        wait(desk, STEP_S)
        desk.train(step)
    return desk


def wait(desk: Any, seconds: float, silent: tuple[str, ...] = ()) -> None:
    """Time passes second by second, with everybody's heartbeats."""
    for _ in range(int(seconds)):
        desk.pass_time(1.0)
        for name in desk.epochs:
            if name not in silent and name in desk.state.clients:
                client = desk.state.clients[name]
                held = [g.lease.id for g in desk.state.groups.leased_by(name)]
                desk.ask(name, m.Heartbeat(state="serving", lineage=client.lineage, serving=client.serving, leases=held))


def ask_batch(desk: Any, step: int) -> None:
    assert desk.ask("t", m.Batch(step=step, wait_s=600.0)) is None


def stalled(desk: Any) -> dict[str, Any]:
    found = desk.status["stalled"]
    assert found is not None
    assert found["since_s"] >= found["limit_s"]
    return found


def notes(desk: Any, monkeypatch: pytest.MonkeyPatch) -> list[Note]:
    heard: list[Note] = []
    perform = desk.perform
    monkeypatch.setattr(desk, "perform", lambda effects: (heard.extend(e for e in effects if isinstance(e, Note)), perform(effects)))
    return heard


# --- when ---


def test_a_run_that_steps_at_its_pace_is_never_stalled(running: Any) -> None:
    for step in range(5, 12):
        running.fill(2, step)
        wait(running, 1.5 * STEP_S)
        running.train(step)
        assert running.status["stalled"] is None


@pytest.mark.parametrize(
    ("stall_min_s", "restarts", "limit_s"), [(10.0, False, 4 * STEP_S), (10.0, True, 4 * STEP_S), (300.0, False, 300.0)]
)
def test_the_limit_is_learned_from_the_run_has_a_floor_and_outlives_the_broker(
    new_desk: Any, stall_min_s: float, restarts: bool, limit_s: float
) -> None:
    desk = trained(new_desk(**(PATIENT | {"stall_min_s": stall_min_s})))
    if restarts:
        desk.restart()
    assert desk.status["stall_limit_s"] == pytest.approx(limit_s)
    ask_batch(desk, 5)
    wait(desk, limit_s - 1)
    assert desk.status["stalled"] is None
    wait(desk, 2)
    assert stalled(desk)["limit_s"] == pytest.approx(limit_s)


def test_one_long_stop_does_not_blunt_the_watch_and_a_slower_run_is_learned(running: Any) -> None:
    running.fill(2, 5)
    wait(running, 3600)
    running.train(5)
    assert running.status["stall_limit_s"] <= 4 * 2 * 4 * STEP_S
    alarms = 0
    for step in range(6, 20):
        running.fill(2, step)
        wait(running, 30 * STEP_S)
        alarms += running.status["stalled"] is not None
        running.train(step)
    assert alarms <= 3


def test_it_is_said_once_and_again_when_it_is_over(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = notes(running, monkeypatch)
    ask_batch(running, 5)
    wait(running, 10 * STEP_S)
    assert [n.is_warning for n in heard if n.text.startswith("stalled for 80 s (limit 80 s): trainer waits for batch 5")] == [True]
    running.fill(2, 5)
    running.train(5)
    assert [n.text for n in heard if "no longer stalled" in n.text] == ["no longer stalled: step 5 is committed after 200 s"]
    assert running.status["stalled"] is None


def test_before_the_first_step_every_finished_group_counts(begun_desk: Any) -> None:
    desk = begun_desk(batch_size=16, stall_min_s=4.0, lease_s=15.0)
    ask_batch(desk, 0)
    for _ in range(15):
        desk.fill(1)
        wait(desk, 35)
        assert desk.status["stalled"] is None
    wait(desk, 10)
    assert "15 of 16 groups ready" in stalled(desk)["reason"]


def test_before_the_first_step_slow_groups_raise_the_limit(begun_desk: Any) -> None:
    desk = begun_desk(stall_min_s=10.0, lease_s=400.0)
    (group,) = desk.lease(1)
    wait(desk, 300)
    desk.put(group)
    assert desk.status["stall_limit_s"] == pytest.approx(1200.0)


def test_before_the_first_step_tokens_that_workers_report_count(begun_desk: Any) -> None:
    desk = begun_desk(stall_min_s=4.0, lease_s=30.0, client_timeout_s=1000.0)
    (group,) = desk.lease(1)
    ask_batch(desk, 0)
    for tokens in range(20, 400, 20):
        wait(desk, 20, silent=("w",))
        desk.ask("w", m.Heartbeat(lineage="L", serving=0, leases=[group.lease], metrics={"tokens": float(tokens)}))
        assert desk.status["stalled"] is None
    wait(desk, 130)
    assert "held for" in stalled(desk)["reason"]


def test_a_broker_that_nobody_joined_is_not_stalled(new_desk: Any) -> None:
    desk = new_desk(stall_min_s=1.0)
    desk.ask("someone", m.Status(), run="")
    desk.join("someone", "client")
    desk.pass_time(10_000)
    assert desk.status["stalled"] is None


@pytest.fixture
def evaluating(new_desk: Any) -> Any:
    """A run that has trained a step each 20 s and evaluates its last version, with limits of 100 s; its worker serves that version."""
    held = {"held": HeldOutSet(num_prompts=3)}
    return finished(trained(new_desk(max_staleness=4, stall_min_s=10.0, eval_datasets=held, eval_first=False)))


def finished(desk: Any) -> Any:
    wait(desk, 5)
    assert desk.ask("t", m.Finish()) == m.Ok()
    desk.ask("w", m.Heartbeat(lineage="L", serving=5))
    return desk


def test_an_evaluation_that_goes_forward_behind_the_last_step_is_not_stalled(evaluating: Any) -> None:
    assert evaluating.status["stall_limit_s"] == 100.0
    for group in evaluating.lease(3, serving=5):
        wait(evaluating, 90)
        evaluating.put(group, version=5)
    assert evaluating.status["state"] == "finished"
    wait(evaluating, 90)
    assert evaluating.status["stalled"] is None


def test_an_evaluation_that_stands_still_is_stalled_and_says_who_holds_it(evaluating: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = notes(evaluating, monkeypatch)
    wait(evaluating, 105)
    assert stalled(evaluating)["reason"].endswith("evaluated at version 5; none leased; w could work and asks for nothing")
    (group,) = evaluating.lease(1, serving=5)
    wait(evaluating, 105)
    found = stalled(evaluating)
    assert (found["role"], found["who"]) == ("rollout", ["w"])
    assert "0 of 3 prompts are evaluated at version 5; 1 leased by w; lease" in found["reason"]
    evaluating.put(group, version=5)
    assert evaluating.status["stalled"] is None
    said = [note.text for note in heard if "stalled" in note.text]
    assert [text.startswith(begin) for text, begin in zip(said, ("stalled for 1", "no longer stalled"), strict=True)] == [True, True]


def test_a_finished_run_is_stalled_while_somebody_does_not_leave(new_desk: Any) -> None:
    desk = finished(trained(new_desk(max_staleness=4, stall_min_s=10.0)))
    wait(desk, 60)
    desk.ask("t", m.Goodbye())
    wait(desk, 90)
    assert desk.status["stalled"] is None
    wait(desk, 15)
    found = stalled(desk)
    assert (found["role"], found["who"], found["reason"]) == ("rollout", ["w"], "the run is finished; w has not left")
    desk.ask("w", m.Goodbye())
    desk.pass_time(500.0)
    assert desk.status["stalled"] is None


def test_a_trainer_that_starts_again_gets_the_time_of_a_first_step(new_desk: Any) -> None:
    desk = trained(new_desk(stall_min_s=15.0, lease_s=200.0, client_timeout_s=1000.0))
    desk.join("t", "trainer", "2")
    wait(desk, 300)
    assert desk.status["stalled"] is None
    wait(desk, 200)
    assert stalled(desk)["reason"].startswith("trainer t has not asked for batch 5")
    desk.begin(step=5, version=5, lineage="M")
    assert desk.status["stalled"] is None


# --- who ---


def leases(desk: Any) -> None:
    desk.lease(2, 5)
    ask_batch(desk, 5)


def two_lease(desk: Any) -> None:
    desk.join("v", "rollout")
    desk.lease(1, 5)
    desk.lease(1, 5, name="v")
    ask_batch(desk, 5)


def fetches(desk: Any) -> None:
    desk.fill(2, 5)
    desk.ask("t", m.Fetch(groups=desk.batch(5)))


def fetches_ahead(desk: Any) -> None:
    fetches(desk)
    desk.fill(2, 5)
    desk.ask("t", m.Fetch(groups=desk.batch(6)))
    wait(desk, STEP_S)
    desk.train(5)


def fetches_and_publishes(desk: Any) -> None:
    fetches(desk)
    desk.publish(6)


def takes_batch(desk: Any) -> None:
    desk.fill(2, 5)
    desk.batch(5)


def worker_leaves(desk: Any) -> None:
    desk.ask("w", m.Goodbye())
    ask_batch(desk, 5)


def worker_pulls(desk: Any) -> None:
    desk.state.clients["w"].serving = m.NO_VERSION
    ask_batch(desk, 5)


def disk_is_full(desk: Any) -> None:
    desk.store_problem = "the disk of /run has 0 bytes free"
    ask_batch(desk, 5)


BATCH = "trainer waits for batch 5: 0 of 2 groups ready; "
TRAINS = "trainer t fetched batch 5 and has been training for 94 s"


@pytest.mark.parametrize(
    ("happens", "silent", "who", "reason"),
    [
        (leases, "w", "rollout w", BATCH + "2 leased by w, silent for 94 s; lease 11 has been held for 94 s"),
        (leases, "", "rollout w", BATCH + "2 leased by w; lease 11 has been held for 94 s"),
        (two_lease, "v", "rollout v", BATCH + "1 leased by w; 1 leased by v, silent for 94 s; lease 11 has been held for 94 s"),
        (fetches, "t", "trainer t", "trainer t has been silent for 94 s; it fetched batch 5 and has been training for 94 s"),
        (fetches, "", "trainer t", TRAINS),
        (fetches_ahead, "", "trainer t", TRAINS.replace("5", "6")),
        (fetches_and_publishes, "", "trainer t", TRAINS + "; version 6 is published, the step is not committed"),
        (takes_batch, "", "trainer t", "trainer t was given batch 5 94 s ago and has not fetched it"),
        (lambda desk: desk.fill(2, 5), "", "trainer t", "trainer t has not asked for batch 5: 2 of 2 groups ready"),
        (
            lambda desk: desk.ask("t", m.Goodbye()),
            "",
            "trainer t",
            "no trainer takes part: t left 94 s ago; step 5 is next and 1 worker waits for it",
        ),
        (worker_leaves, "", "rollout", BATCH + "no rollout worker is connected"),
        (worker_pulls, "", "rollout w", BATCH + "w still pulls version 5"),
        (lambda desk: ask_batch(desk, 5), "", "rollout w", BATCH + "none leased; w could work and asks for nothing"),
        (disk_is_full, "", "broker store", "step 5 waits for the broker's store: the disk of /run has 0 bytes free"),
    ],
)
def test_who_the_run_waits_for_is_named_with_the_reason(running: Any, happens: Any, silent: str, who: str, reason: str) -> None:
    happens(running)
    wait(running, 94, silent=(silent,))
    found = stalled(running)
    assert (" ".join([found["role"], *found["who"]]), found["reason"]) == (who, reason)


def test_workers_without_a_trainer_have_a_reason_of_their_own(new_desk: Any) -> None:
    desk = new_desk(stall_min_s=4.0, lease_s=15.0)
    desk.join("w", "rollout")
    wait(desk, 30)
    assert desk.status["stalled"] is None
    wait(desk, 15)
    assert stalled(desk)["reason"] == "no trainer has joined; 1 worker waits for one"


def test_a_trainer_that_never_publishes_is_named(new_desk: Any) -> None:
    desk = new_desk(stall_min_s=4.0, lease_s=15.0)
    desk.join("t", "trainer")
    desk.join("w", "rollout")
    wait(desk, 41)
    assert stalled(desk)["reason"].startswith("trainer t joined and has not said which step")
    desk.ask("t", m.Resume(step=0, version=0, lineage="L"))
    assert desk.status["stalled"] is None
    wait(desk, 41)
    found = stalled(desk)
    assert (found["role"], found["who"]) == ("trainer", ["t"])
    assert found["reason"] == "1 worker waits for version 0 that trainer t has not published"


def test_workers_held_by_the_bound_wait_for_the_version_that_the_trainer_owes(new_desk: Any) -> None:
    desk = new_desk(max_staleness=0, client_timeout_s=1000.0, lease_s=1000.0, stall_min_s=10.0)
    trained(desk)
    desk.fill(1, 5)
    desk.fill(1, 5)
    assert desk.ask("w", m.Lease(want=1, wait_s=600.0, lineage="L", serving=5)) is None
    wait(desk, 100)
    assert stalled(desk)["role"] == "trainer"


def test_a_store_that_takes_nothing_is_named_although_no_time_passes_for_the_machine(running: Any) -> None:
    running.state.store_problem = "the broker's store cannot be written"
    running.now += 70
    assert running.status["stalled"] is None
    running.now += 20
    assert stalled(running)["who"] == ["store"]
