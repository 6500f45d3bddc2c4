"""A process that joins with other settings than the run's is refused, or told once which value holds."""

from typing import Any

from slimebus.bus import messages as m

RUN = {
    "name": '"mine"',
    "rollout.rollout_temperature": "1.0",
    "rollout.n_samples_per_prompt": "8",
    "rollout.rm_type": '"exact"',
    "rollout.num_rollout": "6",
}


def hello(role: str = "rollout", instance: str = "1", **changes: str) -> m.Hello:
    return m.Hello(role=role, instance=instance, settings=RUN | {name.replace("__", "."): value for name, value in changes.items()})


def test_a_process_of_another_run_is_refused_and_told_what_to_do(new_desk: Any) -> None:
    desk = new_desk(agreed=RUN)
    refused = desk.ask("w", hello(name='"other"'), epoch=0)
    assert refused.code == "wrong_run"
    assert '\'w\' is of run "other", this broker serves run "mine"; give --name' in refused.text


def test_a_process_with_the_settings_of_the_run_hears_of_no_difference(new_desk: Any) -> None:
    assert new_desk(agreed=RUN).ask("w", hello(), epoch=0).differences == []
    assert new_desk(agreed=RUN).ask("w", m.Hello(role="rollout", instance="1"), epoch=0).differences == [], "one who says none has none"


def test_each_difference_is_told_with_both_values_and_whose_holds(new_desk: Any) -> None:
    desk = new_desk(agreed=RUN)
    told = desk.ask("w", hello(rollout__rollout_temperature="0.7", rollout__rm_type='"math"'), epoch=0).differences
    assert told == [
        "rollout.rollout_temperature: w has 0.7, the run has 1.0; the run's value holds",
        'rollout.rm_type: w has "math", the run has "exact"; w follows its own',
    ]


def test_a_trainer_with_more_steps_than_the_broker_is_refused_one_with_fewer_is_told(new_desk: Any) -> None:
    desk = new_desk(agreed=RUN)
    refused = desk.ask("t", hello("trainer", rollout__num_rollout="9"), epoch=0)
    assert refused.code == "config"
    assert "trainer 't' has 9, the broker 6" in refused.text
    (told,) = desk.ask("t", hello("trainer", rollout__num_rollout="5"), epoch=0).differences
    assert told == "rollout.num_rollout: t has 5, the run has 6; t follows its own"


def test_trainer_and_worker_of_different_models_are_told_in_either_order(new_desk: Any) -> None:
    one, other = {"model__hf_checkpoint": "aaaa"}, {"model__hf_checkpoint": "bbbb"}
    for first, second in (("trainer", "rollout"), ("rollout", "trainer")):
        desk = new_desk(agreed=RUN)
        assert desk.ask("first", hello(first, **one), epoch=0).differences == []
        (told,) = desk.ask("second", hello(second, **other), epoch=0).differences
        assert f"of second (hash bbbb) differs from that of {first} first (hash aaaa)" in told
        assert desk.ask("third", hello(second, instance="3", **one), epoch=0, is_alone=True).differences == []


def test_thousands_that_differ_alike_are_a_few_lines(new_desk: Any) -> None:
    desk = new_desk(agreed=RUN, max_clients=4096)
    for i in range(1000):
        (told,) = desk.ask(f"w{i}", hello(rollout__rm_type='"math"'), epoch=0).differences
        assert f"w{i} has" in told
    lines = [note for note in desk.notes if "rm_type" in note]
    assert len(lines) == 10
    assert lines[0].endswith("w0 follows its own")
    assert lines[-1].endswith("w511 follows its own (512 times so far)")


def test_a_trainer_hears_once_of_workers_with_one_other_model(new_desk: Any) -> None:
    desk = new_desk(agreed=RUN)
    for i in range(5):
        desk.ask(f"w{i}", hello(model__hf_checkpoint="bbbb"), epoch=0)
    (told,) = desk.ask("t", hello("trainer", model__hf_checkpoint="aaaa"), epoch=0).differences
    assert "hash bbbb" in told


def test_settings_without_a_bound_are_refused(new_desk: Any) -> None:
    desk = new_desk(agreed=RUN)
    assert desk.ask("w", hello(x="y" * 600), epoch=0).code == "protocol"
    assert desk.ask("w", hello(**{f"s{i}": "1" for i in range(70)}), epoch=0).code == "protocol"
