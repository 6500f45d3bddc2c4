"""Words of a command line."""

import os
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from slimebus.cli.commands.engines import drain
from slimebus.cli.commands.status import status
from slimebus.cli.root import root
from slimebus.config.convert import other_names
from slimebus.config.flags import split_words, trainer_options


@pytest.mark.parametrize("words", [("run.yaml", "http://x:1"), ("http://x:1", "run.yaml")])
def test_the_run_yaml_may_stand_first_or_last(words: tuple[str, ...]) -> None:
    assert split_words(words) == (Path("run.yaml"), ("http://x:1",))


@pytest.mark.parametrize("seconds", ["nan", "-5", "inf"])
def test_a_wait_that_is_no_time_is_refused(seconds: str) -> None:
    refused = CliRunner().invoke(status, ["--timeout-s", seconds])
    assert refused.exit_code == 2
    assert "expected seconds, from 0 to 86400" in refused.output


@pytest.mark.parametrize(("given", "flag"), [("--trainer.dump_samples", "--dump-samples"), ("--broker.max-staleness", "--max-staleness")])
def test_a_field_by_its_dotted_name_is_told_its_flag(given: str, flag: str) -> None:
    refused = CliRunner().invoke(status, [given, "3"])
    assert refused.exit_code == 2
    assert f"No such option '{given}'. Did you mean '{flag}'?" in refused.output


def test_the_flag_of_a_field_that_a_command_does_not_take_is_not_named() -> None:
    assert "Did you mean" not in CliRunner().invoke(drain, ["--trainer.dump_samples", "3"]).output
    assert "Did you mean '--keys'?" in CliRunner().invoke(drain, ["--security.keys", "k"]).output


# --- flags of slime, verl and TRL ---

DOCUMENT = Path(__file__).parents[3] / "docs" / "algorithms.md"
TABLE = re.compile(r"(?<=\| theirs \| here \|\n\|---\|---\|\n)(?:\|.*\n)*")


@pytest.mark.parametrize(
    ("words", "here"),
    [
        ("--eval-prompt-data held.jsonl", "path of a dataset of eval.datasets, in the run.yaml"),
        ("--n-samples-per-eval-prompt=4", "n_samples_per_eval_prompt of a dataset of eval.datasets"),
        ("--loss-type custom", "--advantage-estimator; sft, or"),
        ("--colocate", "not here: trainer and engines have GPUs of their own"),
        ("--num-generations 8", "--n-samples-per-prompt"),
        ("--use-tis", "--corrections tis"),
    ],
)
@pytest.mark.parametrize("command", ["trainer", "up", "config check", "status"])
def test_a_flag_of_slime_or_trl_is_answered_with_what_to_write_here(command: str, words: str, here: str) -> None:
    done = CliRunner().invoke(root, [*command.split(), *words.split()])
    assert done.exit_code == 2
    assert f"No such option '{words.split()[0].partition('=')[0]}'. Here: {here}" in done.output


@pytest.mark.parametrize(
    ("words", "here"),
    [
        ("--kl-loss-type low_var_kl", "expected one of '', k1, k2, k3, unbiased. Here: --kl-loss-type k3"),
        ("--loss-aggregation seq-mean-token-mean", "Here: --loss-aggregation sequence"),
        ("--lr-decay-style constant_with_warmup", "Here: --lr-decay-style constant --lr-warmup-iters N"),
    ],
)
@pytest.mark.parametrize("command", ["trainer", "config check"])
def test_a_value_of_slime_verl_or_trl_is_answered_with_what_to_write_here(command: str, words: str, here: str) -> None:
    done = CliRunner().invoke(root, [*command.split(), *words.split()])
    flag, value = words.split()
    assert f"{flag}: " in str(done.exception)
    assert f"got '{value}'; expected one of" in str(done.exception)
    assert here in str(done.exception)


def test_what_is_suggested_exists_and_the_document_has_the_same_table() -> None:
    commands = [root.get_command(click.Context(root), name) for name in ("trainer", "rollout", "up")]
    known = {option for command in commands for param in command.params for option in param.opts}
    for theirs, here in other_names().items():
        assert f"--{theirs}" not in known, theirs
        for flag in re.findall(r"--[a-z][\w-]+", here):
            setting = trainer_options().option(flag[2:]).name
            assert flag in {*known, "--sglang-tp-size", "--recompute-granularity"} or setting.startswith("algorithm.settings."), (
                theirs,
                flag,
            )
    shown = {theirs: f"`{here}`" if re.fullmatch(r"--[^,;]*", here) else here for theirs, here in other_names().items()}
    rows = "".join(f"| `--{theirs}` | {here} |\n" for theirs, here in shown.items())
    page = DOCUMENT.read_text()
    if os.environ.get("SLIMEBUS_WRITE_GOLDEN"):
        DOCUMENT.write_text(TABLE.sub(lambda _: rows, page, count=1))
    assert TABLE.search(DOCUMENT.read_text())[0] == rows
