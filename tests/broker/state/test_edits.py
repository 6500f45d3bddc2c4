"""Groups dropped, revived and taken in by hand."""

from typing import Any

import msgspec
import pytest
from made_samples import frames, made

from slimebus.bus import messages as m
from slimebus.bus.samples import decode_group

PROMPT = msgspec.msgpack.encode({"prompt": "1+1=", "label": "2", "metadata": {}})


def edit(desk: Any, action: str, *groups: str, name: str = "person", **more: Any) -> m.EditReply:
    reply = desk.ask(name, m.Edit(action=action, groups=list(groups), **more), run="")
    assert isinstance(reply, m.EditReply | m.Error), reply
    return reply  # type: ignore[return-value]


def take_in(desk: Any, version: int = m.NO_VERSION, lineage: str = "L", group: str = "import/x", rewards: tuple[Any, ...] = (1.0,)) -> str:
    samples = frames(*(made((version, 4), reward=reward) for reward in rewards)) if rewards else []
    reply = desk.ask("person", m.Import(group=group, lineage=lineage), bulk=[PROMPT, *samples], run="")
    assert isinstance(reply, m.EditReply), reply
    return reply.done[group]


def fail_until_dead(desk: Any) -> str:
    [group] = desk.lease(1)
    desk.ask("w", m.GiveBack(group=group.group, lease=group.lease, outcome="fail", reason="x" * 300))
    return str(group.group)


@pytest.fixture
def strict(begun_desk: Any) -> Any:
    desk = begun_desk(max_attempts=1)
    return desk


def test_a_dead_letter_is_replayed_with_its_failures_forgotten(strict: Any) -> None:
    name = fail_until_dead(strict)
    assert strict.status["groups"]["dead"] == 1
    strict.restart()
    strict.join("w", "rollout", "1")
    assert edit(strict, "replay", name) == m.EditReply(done={name: "queued"})
    assert edit(strict, "replay", name) == m.EditReply(done={name: "queued"}), "a repeat changes nothing"
    group = strict.state.groups.by_id[name]
    assert (group.phase, group.failures) == ("queued", 0)
    assert strict.status["groups"]["dead"] == 0
    assert strict.status["moves"]["dead>queued replayed"] == 1
    assert not list(strict.store.scan("ended"))
    [again] = strict.lease(1)
    assert again.group == name


def test_a_dead_letter_keeps_its_whole_reason(strict: Any) -> None:
    fail_until_dead(strict)
    [(_, ended)] = strict.store.scan("ended")
    assert "x" * 300 in msgspec.msgpack.decode(ended)["reason"]


@pytest.mark.parametrize("phase", ["queued", "leased", "ready"])
def test_groups_in_play_are_dropped_with_the_reason_and_can_be_replayed(desk: Any, phase: str) -> None:
    [group] = desk.lease(1)
    if phase == "ready":
        desk.put(group)
    elif phase == "queued":
        desk.ask("w", m.GiveBack(group=group.group, lease=group.lease, outcome="requeue", reason=""))
    assert edit(desk, "drop", group.group, reason="label is wrong") == m.EditReply(done={group.group: "dropped"})
    assert edit(desk, "drop", group.group) == m.EditReply(done={group.group: "dropped already"})
    assert desk.status["moves"][f"{phase}>dropped by hand: label is wrong"] == 1
    assert desk.store.get("prompts", group.group) is None
    assert desk.store.get("payloads", group.group) is None
    if phase == "leased":
        assert desk.put(group).result == "discarded"
    assert edit(desk, "replay", group.group).done == {group.group: "queued"}
    assert desk.store.get("prompts", group.group) == b"\xa6prompt"


def test_what_the_trainer_has_is_not_replayed(desk: Any) -> None:
    desk.fill(2)
    first, _ = desk.batch(0)
    assert edit(desk, "replay", first).refused == {first: "it is assigned; only dead and dropped groups are replayed"}
    assert edit(desk, "replay", "0/77", "y" * 1000).refused == {"0/77": "unknown", "y" * 1000: "unknown"}


def test_a_finished_run_takes_nothing_in(strict: Any) -> None:
    name = fail_until_dead(strict)
    assert take_in(strict, group="import/before") == "ready"
    strict.ask("t", m.Finish())
    refused = strict.ask("person", m.Import(group="import/after"), bulk=[PROMPT], run="")
    assert (refused.code, "num_rollout extends it" in refused.text) == ("finished", True)
    assert "the run is finished" in edit(strict, "replay", name).refused[name]
    assert take_in(strict, group="import/before") == "here already: ready", "a repeat gets its answer"


def test_a_dead_letter_can_be_dropped_for_good(strict: Any) -> None:
    name = fail_until_dead(strict)
    assert edit(strict, "drop", name).done == {name: "dropped"}
    assert (strict.status["groups"]["dead"], strict.status["groups"]["dropped"]) == (0, 1)
    assert strict.store.get("prompts", name) is None


def test_a_worker_may_not_change_groups(desk: Any) -> None:
    assert edit(desk, "drop", "0/0", name="w").code == "role"  # type: ignore[attr-defined]
    assert edit(desk, "explode", "0/0").code == "protocol"  # type: ignore[attr-defined]


def test_demonstrations_are_ready_and_are_trained(desk: Any) -> None:
    assert take_in(desk) == "ready"
    assert take_in(desk) == "here already: ready"
    assert take_in(desk, group="import/y") == "ready"
    assert sorted(desk.train(0, checkpoint=1)) == ["import/x", "import/y"]


def test_stored_samples_of_an_import_read_like_those_of_a_put(desk: Any) -> None:
    take_in(desk)
    from broker.store.records import unpack_frames

    (sample,) = decode_group(unpack_frames(desk.store.get("payloads", "import/x")))
    assert sample.reward == 1.0


@pytest.mark.parametrize(("version", "lineage", "why"), [(0, "other", "of lineage other"), (5, "L", "newer than 0")])
def test_samples_that_this_run_could_not_have_made_are_sampled_again(desk: Any, version: int, lineage: str, why: str) -> None:
    result = take_in(desk, version, lineage)
    assert result.startswith("queued: ")
    assert why in result
    [group] = desk.lease(1)
    assert group.group == "import/x", "before the prompts of the source"
    assert desk.store.get("prompts", "import/x") == PROMPT


def test_samples_of_this_run_count_for_the_bound(desk: Any) -> None:
    assert take_in(desk, 0) == "ready"
    for step in range(3):
        desk.fill(2, desk.state.version_of(step))
        desk.train(step)
    assert take_in(desk, 0, group="import/old").startswith("queued: its samples of version 0 are too stale")


def test_an_import_without_a_prompt_or_of_another_name_is_refused(desk: Any) -> None:
    for name, bulk in (("import/x", []), ("0/1", [PROMPT]), ("import/x", [PROMPT, b"q"]), ("import/x", [b"p"])):
        message = m.Import(group=name)
        assert desk.ask("person", message, bulk=bulk, run="").code == "protocol"


def test_the_log_names_the_key_of_whoever_changes_settings_or_groups(desk: Any) -> None:
    [group] = desk.fill(1)
    desk.ask("boss", m.Set(key="k", settings={"max_staleness": 3.0}), key="client")
    desk.ask("boss", m.Edit(action="drop", groups=[group], reason="r"), key="client")
    desk.ask("boss", m.Import(group="import/a/0"), key="client", bulk=[PROMPT])
    assert [note for note in desk.notes if note.startswith("boss (key client)")] == [
        "boss (key client) changed max_staleness from 1 to 3, from step 0 on",
        f"boss (key client): drop of 1 groups: {group}",
        "boss (key client): import of group import/a/0: queued",
    ]
