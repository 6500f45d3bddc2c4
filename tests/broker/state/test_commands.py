"""Commands to workers: told with a heartbeat reply until a heartbeat says what became of them."""

from typing import Any

from slimebus.bus import messages as m

ATTACH = m.Command(key="k", action="attach", worker="w", url="http://e:1")


def beat(desk: Any, worker: str, **about: Any) -> Any:
    return desk.ask(worker, m.Heartbeat(state="serving", **about)).commands


def test_a_command_reaches_its_worker_and_its_outcome_whoever_asked(desk: Any) -> None:
    desk.join("x", "rollout")
    assert desk.ask("op", ATTACH, run="") == m.CommandReply(worker="w")
    assert (beat(desk, "x"), beat(desk, "w")) == ([], [ATTACH])
    assert beat(desk, "w") == [ATTACH], "a reply may have been lost"
    assert desk.ask("op", ATTACH, run="") == m.CommandReply(worker="w")
    done = m.CommandReply(done=True, text="it is there")
    assert beat(desk, "w", outcomes={"k": done}) == []
    assert desk.ask("op", ATTACH, run="") == done
    assert beat(desk, "w") == [], "asking for an outcome begins nothing anew"


def test_a_worker_that_is_not_there_is_named_with_those_that_are(desk: Any) -> None:
    desk.ask("w", m.Goodbye())
    nobody = desk.ask("op", m.Command(key="k", action="drain"), run="")
    assert (nobody.code, nobody.text) == ("no_worker", "name one of the workers of this run: none")
    for worker in ("w", "x"):
        desk.join(worker, "rollout")
    assert desk.ask("op", m.Command(key="k", action="drain"), run="").text.endswith("of this run: w, x")
    assert desk.ask("op", m.Command(key="k", action="drain", worker="y"), run="").text == "no worker 'y' in this run; there are: w, x"
    desk.ask("x", m.Goodbye())
    assert desk.ask("op", m.Command(key="k", action="drain"), run="") == m.CommandReply(worker="w")


def test_a_worker_cannot_be_given_commands_without_end_nor_by_another_worker(desk: Any) -> None:
    for number in range(64):
        desk.ask("op", m.Command(key=f"k{number}", action="drain"), run="")
    assert desk.ask("op", m.Command(key="one more", action="drain"), run="").code == "busy"
    assert desk.ask("w", m.Command(key="k0", action="drain")).code == "role"
    outcomes = {f"k{number}": m.CommandReply(done=True) for number in range(64)}
    assert beat(desk, "w", outcomes=outcomes) == []
    assert beat(desk, "w", outcomes={"k64": m.CommandReply(done=True)}) == []


def test_the_status_has_the_engines_that_a_worker_reports(desk: Any) -> None:
    beat(desk, "w", engines=[m.EngineReport(url="http://e:1", state="sick", version=3, running=2)])
    (client,) = [client for client in desk.status["clients"] if client["name"] == "w"]
    assert client["engines"] == [{"url": "http://e:1", "model": "", "state": "sick", "version": 3, "running": 2, "is_owned": False}]
