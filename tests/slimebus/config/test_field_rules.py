from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from broker.main import build_broker
from slimebus.bus.errors import ConfigError
from slimebus.cli.commands.config import check
from slimebus.config import resolve

DEMONSTRATIONS = """
rollout: {custom_generate_function_path: "solve.py:solve"}
engine: {engine: ENGINE}
eval: {datasets: {held: {path: held.jsonl}}}
"""


def run_yaml(tmp_path: Path, engine: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(DEMONSTRATIONS.replace("ENGINE", engine))
    return file


def test_a_run_without_engines_that_is_to_be_evaluated_is_refused(tmp_path: Path) -> None:
    """It would wait for its evaluations for ever."""
    file = run_yaml(tmp_path, "none")
    with pytest.raises(ConfigError, match=r"eval.datasets held need an engine .* engine.engine is none; set engine.engine"):
        build_broker(resolve(file, environ={}))
    refused = CliRunner().invoke(check, [str(file)])
    assert isinstance(refused.exception, ConfigError)


def test_a_worker_without_an_engine_may_join_a_run_that_is_evaluated(tmp_path: Path) -> None:
    file = run_yaml(tmp_path, "cpu")
    assert CliRunner().invoke(check, [str(file), "--syntax"]).exit_code == 0
    assert resolve(file, {"engine.engine": "none"}, environ={}).config.eval.datasets


def more(**given: Any) -> dict[str, Any]:
    return {"rollout.sampling_params": given}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"weights.weights_bind": "nonsense"}, "weights.weights_bind is 'nonsense'; expected tcp://HOST:PORT"),
        ({"weights.weights_bind": ""}, "weights.weights_bind is ''; expected tcp://HOST:PORT"),
        ({"weights.fanout_bind": "tcp://0.0.0.0:99999"}, "weights.fanout_bind is 'tcp://0.0.0.0:99999'; expected"),
        ({"broker.bind": "127.0.0.1:5555"}, "broker.bind is '127.0.0.1:5555'; expected"),
        ({"broker.hints_bind": "tcp://x"}, "broker.hints_bind is 'tcp://x'; expected"),
        ({"weights.weights_advertise": "tcp://node1:5600"}, "weights.weights_advertise: 'tcp://node1:5600'; expected a host name"),
        ({"engine.attach_hosts": ["gpu7", "http://gpu8"]}, "engine.attach_hosts: 'http://gpu8'; expected a host name or address alone"),
        ({"engine.engine_url": "nonsense"}, "engine.engine_url: 'nonsense'; expected http://HOST:PORT"),
        ({"engine.engine_url": ["http://a:30000", "http://b:x"]}, "engine.engine_url: 'http://b:x'; expected http://HOST:PORT"),
        ({"rollout.rollout_top_k": 0}, "rollout.rollout_top_k: 0; expected at least 1, or -1 for all tokens"),
        ({"rollout.custom_rm_path": "check_reward_nonzero_std"}, "check_reward_nonzero_std is a filter of groups and no reward"),
        (
            {"rollout.custom_rm_path": "keep.py:keep", "rollout.dynamic_sampling_filter_path": "keep.py:keep"},
            "rollout.custom_rm_path: keep.py:keep is a filter of groups and no reward",
        ),
        ({"broker.lease_s": 2, "broker.heartbeat_s": 2}, "broker.lease_s: 2 is not above heartbeat_s 2, so every lease would expire"),
        ({"broker.buffer_capacity": 5, "rollout.rollout_batch_size": 8}, "buffer_capacity: 5 is below rollout.rollout_batch_size 8"),
        ({"trainer.dump_samples": 7, "rollout.n_samples_per_prompt": 8}, "groups are kept whole, so give 0 for none or at least"),
        ({"rollout.rollout_batch_size": 2049, "rollout.n_samples_per_prompt": 8}, "2049 groups; at most 2048 fit one batch reply"),
        (
            more(repetition_penalti=1.1),
            "rollout.sampling_params.repetition_penalti: no such sampling parameter; did you mean 'repetition_penalty'?",
        ),
        (more(repetition_penalty=3), "rollout.sampling_params.repetition_penalty: 3; Expected `float` <= 2.0"),
        (more(min_new_tokens="many"), "rollout.sampling_params.min_new_tokens: 'many'; Expected `int | null`, got `str`"),
        (more(min_new_tokens=2000), "min_new_tokens: 2000 is above rollout_max_response_len 1024"),
        (more(temperature=0.5), "rollout.sampling_params.temperature: set rollout.rollout_temperature instead"),
        (more(max_new_tokens=5), "set rollout.rollout_max_response_len instead"),
        (
            {"trainer.sequence_parallel": True},
            "trainer.sequence_parallel: true with tensor_model_parallel_size 1",
        ),
    ],
)
def test_what_no_process_could_use_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, flags, environ={})
    assert message in caught.value.text


def test_addresses_of_other_machines_and_urls_of_engines_are_taken() -> None:
    flags = {"weights.weights_bind": "tcp://0.0.0.0:5600", "weights.weights_advertise": "[fe80::1]", "broker.bind": "tcp://[::]:5555"}
    resolve(None, flags | {"engine.engine_url": ["http://127.0.0.1:30000", "https://node7/"]}, environ={})


def test_more_sampling_parameters_go_to_the_engine_of_training_and_evaluation() -> None:
    flags = {"rollout.sampling_params": {"min_new_tokens": 4, "ignore_eos": True}}
    made = resolve(None, flags, environ={}).config.rollout.sampling
    assert (made["min_new_tokens"], made["ignore_eos"], made["temperature"]) == (4, True, 1.0)
