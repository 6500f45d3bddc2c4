"""An engine's checksums against the trainer's tensors: what is the same, what differs, what cannot be compared and why."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from slimebus_command import slimebus

from slimebus.commands.weights import weights
from slimebus.errors import SlimebusError, Unreachable
from slimebus.weights.engine_sums import EngineSums, Verdict, compare, sums_of
from slimebus.weights.gpu_sum import gpu_sum
from slimebus.weights.rounding import rounded
from slimebus.weights.safetensors_file import as_weights, write_model
from slimebus.weights.server import WeightServer
from slimebus.weights.store import VersionStore
from slimebus.weights.tensors import Tensor, as_tensor

LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (64, 8),
    LAYER + "self_attn.q_proj.weight": (16, 8),
    LAYER + "self_attn.k_proj.weight": (8, 8),
    LAYER + "self_attn.v_proj.weight": (8, 8),
    LAYER + "self_attn.o_proj.weight": (8, 16),
    LAYER + "mlp.gate_proj.weight": (12, 8),
    LAYER + "mlp.up_proj.weight": (12, 8),
    "model.norm.weight": (8,),
}
EXPERTS = LAYER + "mlp.experts."
GATE_UP = [LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"]
QKV = [LAYER + f"self_attn.{part}_proj.weight" for part in "qkv"]


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    return {name: as_tensor(name, rng.integers(0, 1 << 16, shape).astype(np.uint16)) for name, shape in (SHAPES | shapes).items()}


def sglang(of: dict[str, Tensor], **changed: bytes) -> dict[str, str]:
    """What SGLang would answer, written out by hand."""
    data = {name: tensor.buffer.tobytes() for name, tensor in of.items()}
    q, k, v = (data.pop(name) for name in QKV)
    data[LAYER + "self_attn.qkv_proj.weight"] = q + k + v
    data[LAYER + "mlp.gate_up_proj.weight"] = data.pop(LAYER + "mlp.gate_proj.weight") + data.pop(LAYER + "mlp.up_proj.weight")
    return {name: hashlib.sha256(value).hexdigest()[:16] for name, value in (data | changed).items()}


def verdict(sums: dict[str, str], of: dict[str, Tensor], *, device: str = "cpu", num_ranks: int = 1) -> Verdict:
    return compare(EngineSums("http://e", "L:1", sums, device, num_ranks), as_weights(of))


def test_fused_parameters_are_compared_with_the_tensors_they_are_made_of() -> None:
    of = tensors()
    found = verdict(sglang(of), of)
    assert (found.is_same, found.same) == (True, sorted(of))


def test_a_fused_parameter_that_differs_names_all_its_tensors() -> None:
    of = tensors()
    sums = sglang(of)
    of[QKV[1]] = of[QKV[1]]._replace(buffer=of[QKV[1]].buffer ^ 1)
    found = verdict(sums, of)
    assert (found.is_same, found.different, found.uncompared) == (False, sorted(QKV), {})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_engine_of_another_dtype_has_the_same_values_converted(dtype: str) -> None:
    of = {name: as_tensor(name, t.array() & 0xBFFF) for name, t in tensors().items()}  # no NaN: conversions keep no bits of it
    wide = {name: (t.steps.astype(np.uint32) << 16).view(np.float32).reshape(t.shape) for name, t in of.items()}
    held = sglang({name: as_tensor(name, values.astype(dtype)) for name, values in wide.items()})
    found = verdict(held, of)
    assert (found.is_same, found.held_as) == (True, (dtype,))
    assert verdict(held, {name: as_tensor(name, values) for name, values in wide.items()}).held_as == (dtype,)  # of a float32 directory


def test_a_directory_in_float32_is_compared_as_the_trainer_would_publish_it() -> None:
    rng = np.random.default_rng(0)
    of = {name: as_tensor(name, rng.normal(size=t.shape).astype(np.float32)) for name, t in tensors().items()}
    assert verdict(sglang({name: rounded(tensor) for name, tensor in of.items()}), of).held_as == ("bfloat16",)


def test_a_vocabulary_is_padded_and_a_tied_head_is_the_embedding() -> None:
    of = tensors(**{"model.embed_tokens.weight": (50, 8)})
    embedding = of["model.embed_tokens.weight"].buffer.tobytes()
    padded = {"model.embed_tokens.weight": embedding + bytes(14 * 8 * 2)}
    assert verdict(sglang(of, **padded), of).is_same
    assert verdict(sglang(of, **padded, **{"lm_head.weight": embedding}), of).is_same
    of["lm_head.weight"] = of["model.embed_tokens.weight"]
    without = {name: value for name, value in sglang(of, **padded).items() if name != "lm_head.weight"}
    assert verdict(without, of).is_same


def test_an_engine_with_the_trainers_names_is_compared_by_the_trainers_hashes() -> None:
    of = tensors()
    hashes = dict(as_weights(of).hashes)
    assert verdict(hashes, of, num_ranks=1).is_same
    hashes["model.norm.weight"] = "0" * 32
    assert verdict(hashes, of).different == ["model.norm.weight"]


def test_what_only_one_side_has_is_said_and_is_not_the_same() -> None:
    of = tensors()
    sums = sglang(of) | {LAYER + "mlp.experts.w13_weight": "0" * 16}
    del sums["model.norm.weight"]
    found = verdict(sums, of)
    assert not found.is_same
    assert found.different == []
    assert found.uncompared == {
        LAYER + "mlp.experts.w13_weight": "the trainer publishes nothing for it",
        "model.norm.weight": "the engine has no parameter for it",
    }


def test_a_split_model_is_not_taken_for_a_difference() -> None:
    of = tensors()
    found = verdict(sglang(of), of, num_ranks=2)
    assert (found.is_same, found.same, found.different) == (False, [], [])
    assert found.uncompared == dict.fromkeys(sorted(of), "the engine splits it over 2 ranks")


def with_experts() -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors with eleven experts, and what SGLang stacks of them."""
    names = [EXPERTS + f"{number}.{part}_proj.weight" for number in range(11) for part in ("gate", "up", "down")]
    of = tensors(**dict.fromkeys(names, (4, 8)))
    dense = {name: tensor for name, tensor in of.items() if not name.startswith(EXPERTS)}
    data = [of[name].buffer.tobytes() for name in names]
    w13 = b"".join(gate + up for gate, up in zip(data[::3], data[1::3], strict=True))
    return of, sglang(dense, **{EXPERTS + "w13_weight": w13, EXPERTS + "w2_weight": b"".join(data[2::3])})


def test_experts_are_compared_with_the_tensors_that_are_stacked() -> None:
    of, sums = with_experts()
    found = verdict(sums, of)
    assert (found.is_same, found.same) == (True, sorted(of))
    of[EXPERTS + "10.up_proj.weight"] = of[EXPERTS + "9.up_proj.weight"]
    assert verdict(sums, of).different == sorted(name for name in of if name.startswith(EXPERTS) and "down" not in name)


def test_sums_made_on_a_gpu_are_made_here_too_but_experts_may_be_in_an_order_of_the_kernels() -> None:
    of, sums = with_experts()
    on_gpu = {name: gpu_sum(tensor.buffer) for name, tensor in of.items() if "_proj" not in name or "o_proj" in name}
    for fused, parts in ((LAYER + "self_attn.qkv_proj.weight", QKV), (LAYER + "mlp.gate_up_proj.weight", GATE_UP)):
        on_gpu[fused] = gpu_sum(np.concatenate([of[part].buffer for part in parts]))
    on_gpu["model.norm.weight"] = "0" * 16
    found = verdict(sums | on_gpu, of, device="cuda")
    assert found.different == ["model.norm.weight"]
    assert set(found.uncompared) == {name for name in of if name.startswith(EXPERTS)}
    assert "in an order of its kernels" in found.uncompared[EXPERTS + "0.up_proj.weight"]


# --- the command, against an engine of a few lines ---


class Engine(ThreadingHTTPServer):
    """Answers with `sums` and those of `others`, of each of `versions` in turn and then of the last."""

    sums: dict[str, str]
    others: tuple[dict[str, str], ...] = ()
    versions: tuple[str, ...] = ("L:0",)
    asked = 0

    def version(self) -> str:
        self.asked += 1
        return self.versions[min(self.asked, len(self.versions)) - 1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        assert isinstance(self.server, Engine)
        body: dict[str, Any] = (
            {"device": "cpu"}
            if self.path == "/server_info"
            else {"ranks": [{"checksums": sums} for sums in (self.server.sums, *self.server.others)]}
        )
        if self.path == "/model_info":
            body = {"weight_version": self.server.version()}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check(*words: Any) -> Result:
    return CliRunner().invoke(weights, ["check", *map(str, words)])


def test_check_says_that_an_engine_has_what_a_directory_holds(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # engines are asked directly
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    engine.sums = sglang(tensors())
    write_model(tmp_path / "model", tensors())
    done = check(engine.url, tmp_path / "model")
    assert done.exit_code == 0, done.output
    assert "version L:0" in done.output
    assert "8 tensors same, 0 different, 0 not compared: the engine has exactly these weights" in done.output


@pytest.fixture
def trainer() -> Iterator[WeightServer]:
    """Publishes version 0 of lineage L."""
    store = VersionStore(keep=2, lineage="L", first_version=0)
    store.publish({name: tensor.array() for name, tensor in tensors().items()})
    server = WeightServer(store, "tcp://127.0.0.1:0")
    yield server
    server.close()


def test_check_ends_with_1_and_names_what_differs_from_the_trainer(engine: Engine, trainer: WeightServer) -> None:
    engine.sums = sglang(tensors()) | {"model.norm.weight": "0" * 16, "model.extra": "0" * 16}
    done = check(engine.url, "--trainer", trainer.endpoint)
    told = json.loads(check(engine.url, "--trainer", trainer.endpoint, "--json").output)
    assert done.exit_code == 1
    assert "different: model.norm.weight\nnot compared: model.extra: the trainer publishes nothing for it" in done.output
    assert "7 tensors same, 1 different, 1 not compared\n" in done.output
    assert (told["is_same"], told["different"], told["source"]["version"]) == (False, ["model.norm.weight"], "L:0")


def test_check_compares_at_one_version_although_the_engine_moves_meanwhile(engine: Engine, trainer: WeightServer) -> None:
    engine.sums = sglang(tensors())
    engine.versions = ("K:8", "K:8", "K:9", "L:0", "K:9", "L:0")  # the fifth while the sums are made, and so they are made again
    done = check(engine.url, "--trainer", trainer.endpoint)
    assert (done.exit_code, engine.asked) == (0, 8), done.output


@pytest.mark.parametrize(
    ("version", "said"),
    [("L:2", "the engine is 2 versions ahead"), ("K:0", "of another lineage of the trainer"), ("default", "the ones it was started with")],
)
def test_check_says_how_the_versions_differ(
    engine: Engine, trainer: WeightServer, monkeypatch: pytest.MonkeyPatch, version: str, said: str
) -> None:
    monkeypatch.setattr("slimebus.commands.weights_check.SETTLE_S", 0.0)
    engine.sums, engine.versions = {"model.norm.weight": "0" * 16}, (version,)
    done = check(engine.url, "--trainer", trainer.endpoint)
    assert done.exit_code == 1
    assert said in done.output
    assert "another model, another version" in done.output


def test_an_absent_broker_or_publisher_is_named_long_before_the_timeout(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimebus.commands.weights_check.ANSWER_S", 0.3)
    engine.sums = {}
    for option, said in (("--broker", "no broker answered at"), ("--trainer", "no answer from the weight server at")):
        with pytest.raises(Unreachable, match=f"{said} tcp://127.0.0.1:1 in 0 s"):
            CliRunner().invoke(weights, ["check", engine.url, option, "tcp://127.0.0.1:1"], catch_exceptions=False)


def test_the_exit_code_reaches_the_shell(engine: Engine, tmp_path: Path) -> None:
    engine.sums = sglang(tensors()) | {"model.norm.weight": "0" * 16}
    write_model(tmp_path / "model", tensors())
    done = slimebus("weights", "check", engine.url, tmp_path / "model")
    assert (done.returncode, "different: model.norm.weight" in done.stdout) == (1, True), done.stderr


def test_replicas_count_as_one_and_parts_do_not(engine: Engine) -> None:
    engine.sums, engine.others = {"a": "1"}, ({"a": "1"}, {"a": "1"})
    assert sums_of(engine.url, 10.0).num_ranks == 1
    engine.others = ({"a": "1"}, {"a": "2"})
    assert sums_of(engine.url, 10.0).num_ranks == 2


def test_an_engine_that_is_not_there_or_has_no_checksums_is_an_error(engine: Engine) -> None:
    engine.sums = {}
    with pytest.raises(SlimebusError, match="answered without checksums"):
        sums_of(engine.url, 10.0)
    with pytest.raises(Unreachable, match="is its address right"):
        sums_of("http://127.0.0.1:1", 1.0)


def test_check_needs_exactly_one_thing_to_compare_with(engine: Engine, tmp_path: Path) -> None:
    for words in ((), (tmp_path, "--trainer", "tcp://127.0.0.1:1"), ("--trainer", "tcp://127.0.0.1:1", "--broker", "tcp://127.0.0.1:2")):
        with pytest.raises(SlimebusError, match="give one of MODEL_DIR, --trainer and --broker"):
            CliRunner().invoke(weights, ["check", engine.url, *map(str, words)], catch_exceptions=False)
