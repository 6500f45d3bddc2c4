"""The ranks of test_parallel_layouts: each layout's own processes, forked from this one, which has imported megatron for all of them. Where
there is CUDA each is a process of its own from the start: what torch knows of CUDA does not survive a fork.

    stdin:  a line for each layout: {"ranks": 2, "model": PATH, "out": PATH, "layout": {"tensor_model_parallel_size": 2}}
    stdout: a line for each: the exit code of each rank

A rank trains three steps on random groups; rank 0 writes what it saw to `out` as JSON. With "resume": PATH it goes on from a checkpoint for
one step instead; with "own_disks" the ranks share no folder of checkpoints; with "killed" they are killed (-9) in the middle of a second
save; with "full_disk", the number of a rank, that one has no room for it. With "critic" a critic learns in place of the policy. With
"models", a map of name to [PATH, layout] in the place of model and layout, it loads each of them and does not train. With "lrs", a map of
rank to learning rate, these ranks have another. With "losses" it also takes steps with other losses, which leave the weights as they are.
"""

import errno
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from slimebus.bus.errors import SlimebusError
from slimebus.bus.samples import Sample
from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig, BrokerConfig, OptimizerConfig, TrainerConfig
from slimebus.process.launch import free_port
from slimebus.weights.tensors import Tensor, as_tensor, host_bytes
from trainer.compat import cpu_compat

cpu_compat.import_megatron()

from trainer.batches.batch import Batch, TrainingGroup  # noqa: E402
from trainer.checkpoint import save  # noqa: E402
from trainer.checkpoint.folder import Progress  # noqa: E402
from trainer.checkpoint.load import load_checkpoint  # noqa: E402
from trainer.checkpoint.rank_file import write_rank_file  # noqa: E402
from trainer.checkpoint.save import BackgroundSave  # noqa: E402
from trainer.critic.critic import Critic  # noqa: E402
from trainer.mismatch import engine_mismatch  # noqa: E402
from trainer.model import hf_export, parallel  # noqa: E402
from trainer.model.policy import Policy  # noqa: E402
from trainer.objective.aggregation import AGGREGATIONS  # noqa: E402
from trainer.objective.build_objective import build_objective  # noqa: E402
from trainer.objective.group_rewards import per_group  # noqa: E402
from trainer.objective.objective import Objective  # noqa: E402
from trainer.objective.plugin import PolicyGradient, TokenLoss  # noqa: E402
from trainer.objective.row import Row  # noqa: E402
from trainer.publish.rank_part import HostSnapshot  # noqa: E402

NONE = torch.empty(0)
hf_export.PART_BYTES = 1  # of a model so small one rank would publish all


def groups(seed: int) -> list[TrainingGroup]:
    draw = np.random.default_rng(seed)

    def sample(prompt: int, reward: float) -> Sample:
        length = prompt + int(draw.integers(1, 25))
        return Sample(
            tokens=draw.integers(0, 38, length).astype(np.int32),
            loss_mask=(np.arange(length) >= prompt).astype(np.uint8),
            rollout_logprobs=(-3.6 + 0.2 * draw.standard_normal(length)).astype(np.float32),
            versions=[(0, length)],
            reward=reward,
            temperature=(0.7, 1.0, 1.3)[length % 3],
        )

    return [TrainingGroup(f"g{g}", [sample(3 + g, r) for r in (0.0, 1.0, float(g % 2))]) for g in range(5)]


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: hashlib.sha256(host_bytes(tensor.detach()).tobytes()).hexdigest() for name, tensor in tensors}


class SequenceRatio(PolicyGradient):
    """Knows where sequences end (GSPO's ratio), chooses over the whole optimizer step, and reads a field of the samples."""

    def advantages(self, batch: Batch) -> np.ndarray:
        bonus = batch["bonus"][batch.ends - 1]  # of each token of a sample the same
        return per_group(batch, batch["reward"] + bonus, lambda of_group, _: of_group - of_group.mean())

    def prepare(self, part: Batch) -> dict[str, np.ndarray]:
        return {"median": np.full(part.num_tokens, np.median(part["current_logprobs"]), np.float32)}

    def needs(self) -> set[str]:
        return {"current_logprobs", "bonus"}

    def loss(self, row: Row) -> TokenLoss:
        ratio = row.sequence_mean(row.new_logprobs - row.rollout_logprobs).exp()
        spread = row.sequence_sum((row.new_logprobs - row["median"]).square()) / row.sequence_lengths
        return TokenLoss(-ratio * row.advantages + 0.1 * spread, {"ratio": ratio.detach()})


def sequence_step(policy: Policy, batch: list[TrainingGroup] | None, aggregation: str) -> dict[str, float]:
    """A step with SequenceRatio at learning rate 0; two of a group's three samples are one trajectory."""
    for group in batch or ():
        for i, sample in enumerate(group.samples):
            sample.trajectory, sample.extras = i // 2, {"bonus": np.full(1, 0.1 * i, np.float32)}
    given, optimizer = policy.objective, msgspec.structs.replace(policy.config.optimizer, lr=0.0)
    config = msgspec.structs.replace(policy.config, algorithm=AlgorithmConfig(loss_aggregation=aggregation))  # type: ignore[arg-type]
    trained = policy.config
    policy.config = msgspec.structs.replace(config, optimizer=optimizer)
    policy.objective = Objective(config, SequenceRatio(config, SequenceRatio.Settings()), [])
    try:
        return policy.train(batch, num_steps=2)
    finally:
        policy.objective, policy.config = given, trained


CORRECTIONS = {"m2po": {"m2po_tau": 0.01}, "vcpo": {}, "tis": {"tis_level": "sequence", "tis_batch_normalize": True}}


def corrected_step(policy: Policy, batch: list[TrainingGroup] | None, correction: str) -> dict[str, float]:
    """A step with a correction that chooses over the whole optimizer step, at a learning rate that leaves the weights as they are."""
    algorithm = AlgorithmConfig(corrections=[correction], settings=CORRECTIONS[correction])
    config = msgspec.structs.replace(
        policy.config, algorithm=algorithm, optimizer=msgspec.structs.replace(policy.config.optimizer, lr=1e-12)
    )
    given, trained, policy.config, policy.objective = policy.objective, policy.config, config, build_objective(config)
    try:
        return policy.train(batch, num_steps=2, version=3)
    finally:
        policy.objective, policy.config = given, trained


class Kept:
    """This rank's part of a version, as its publication would give it back."""

    oldest_kept = 0

    def __init__(self, policy: Policy) -> None:
        taken = HostSnapshot().copy_to_host(policy.export.owned_tensors())
        self.tensors = {name: as_tensor(name, value) for name, value in taken.items()}

    def wait(self) -> None: ...

    def kept_tensors(self, version: int) -> dict[str, Tensor] | None:
        return self.tensors if version == 0 else None


def write_half_and_die(path: Path, host: str, held: list) -> None:
    write_rank_file(path, host, held[: len(held) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def fail_to_write(path: Path, host: str, held: list) -> None:
    write_rank_file(path, host, held[: len(held) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def trainer_config(layout: dict, max_tokens: int) -> TrainerConfig:
    """In float32 unless the layout says otherwise, with or without CUDA."""
    given = {name: value for name, value in layout.items() if name != "megatron"}
    return TrainerConfig(**{"max_tokens_per_gpu": max_tokens, "params_dtype": "float32", **given})


def train(asked: dict) -> None:
    model, out, layout = asked["model"], Path(asked["out"]), asked["layout"]
    config = RunConfig(
        optimizer=OptimizerConfig(lr=asked.get("lrs", {}).get(os.environ["RANK"], 1e-3), lr_warmup_iters=2, clip_grad=1.0),
        algorithm=AlgorithmConfig(use_rollout_logprobs=False, corrections=["tis"], entropy_coef=0.01),
        trainer=trainer_config(layout, 64),
        megatron=layout.get("megatron", {}),
    )
    policy = Policy.build(config, model)
    batch = lambda step: groups(step) if parallel.is_main_rank() else None  # noqa: E731
    own_disk = f"-{os.environ['RANK']}" if asked.get("own_disks") else ""
    if "resume" in asked:
        found = load_checkpoint(asked["resume"] + own_disk, policy)
        assert found is not None
        seen: dict[str, object] = {"step": found.step, "metrics": policy.train(batch(3))}
        if parallel.is_main_rank():
            out.write_text(json.dumps(seen))
        policy.close()
        return
    seen = {"exported": digest(policy.export.tensors()), "owners": policy.export.owners}
    assert parallel.broadcast_value("-" * parallel.rank(), str) == "", "what other ranks give, of any size, does not count"
    seen["owned"] = parallel.gather(digest(policy.export.owned_tensors()), dict)
    seen["logprobs"] = [float(x.sum()) for x in policy.logprobs(batch(0))]
    kept = Kept(policy)
    seen["metrics"] = [policy.train(batch(step)) for step in range(3)]
    if asked.get("losses"):
        seen["mismatch"] = engine_mismatch(policy, kept, batch(0), 3)  # type: ignore[arg-type]
        seen["aggregations"] = {name: sequence_step(policy, batch(3), name) for name in AGGREGATIONS}
        seen["corrections"] = {name: corrected_step(policy, batch(3), name) for name in CORRECTIONS}
    folder = str(out.with_suffix(".checkpoint")) + own_disk
    BackgroundSave(folder, policy, Progress(3, 7, policy.num_updates)).finish(keep=2)
    after = policy.train(batch(3))
    if asked.get("killed"):
        out.write_text(json.dumps({"after_save": after}))
        save.write_rank_file = write_half_and_die
        BackgroundSave(folder, policy, Progress(4, 8, policy.num_updates)).finish(keep=1)
    if "full_disk" in asked:
        if asked["full_disk"] == os.environ["RANK"]:
            save.write_rank_file = fail_to_write
        try:
            BackgroundSave(folder, policy, Progress(4, 8, policy.num_updates)).finish(keep=1)
        except SlimebusError as bad:
            seen["failed"] = parallel.gather(bad.text, str)
    found = load_checkpoint(folder, policy)
    assert found is not None
    assert (found.step, found.version) == (3, 7)
    seen["after_save"], seen["after_load"] = after, policy.train(batch(3))
    policy.save_hf(str(out.with_suffix(".hf")))
    if parallel.is_main_rank():
        out.write_text(json.dumps(seen))
    policy.close()


def learn(asked: dict) -> None:
    """A critic: its values, three steps, and the same step before a save and after the load; with "resume" a step from that checkpoint."""
    out, layout = Path(asked["out"]), asked["layout"]
    config = RunConfig(
        broker=BrokerConfig(required_fields=["values"]),
        optimizer=OptimizerConfig(lr=1e-2),
        algorithm=AlgorithmConfig(advantage_estimator="ppo", settings={"lambd": 0.9}),
        trainer=trainer_config(layout, 64),
        megatron=layout.get("megatron", {}),
    )
    critic = Critic.build(config, asked["model"])

    def step(seed: int) -> dict[str, float]:
        batch = groups(seed) if parallel.is_main_rank() else None
        values = iter(critic.values(batch))
        for sample in (sample for group in batch or () for sample in group.samples):
            sample.extras = {"values": next(values)}
        return critic.train(batch, num_steps=2)

    seen: dict[str, object] = {}
    if "resume" in asked:
        assert load_checkpoint(asked["resume"], critic) is not None
    else:
        seen["metrics"] = [step(seed) for seed in range(3)]
        BackgroundSave(out.with_suffix(".checkpoint"), critic, Progress(3, 0, critic.num_updates)).finish(keep=2)
    seen["after"] = step(3)
    if parallel.is_main_rank():
        out.write_text(json.dumps(seen))
    critic.close()


def load(models: dict[str, tuple[str, dict]], out: Path, ports: list[int]) -> None:
    """What every model exports other than it was loaded, and the logprobs of random tokens."""
    seen: dict[str, object] = {"tokens": [sample.tokens.tolist() for group in groups(0) for sample in group.samples]}
    seen["temperatures"] = [sample.temperature for group in groups(0) for sample in group.samples]
    for port, (name, (model, layout)) in zip(ports, models.items(), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        policy = Policy.build(RunConfig(trainer=trainer_config(layout, 500), megatron=layout.get("megatron", {})), model)
        want, got = load_file(Path(model) / "model.safetensors"), dict(policy.export.tensors())
        changed = [tensor for tensor in want.keys() | got.keys() if not torch.equal(want.get(tensor, NONE), got.get(tensor, NONE))]
        logprobs = policy.logprobs(groups(0) if parallel.is_main_rank() else None)
        seen[name] = {"changed": changed, "logprobs": [part.tolist() for part in logprobs]}
        policy.close()
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(seen))


def start_rank(asked: dict, rank: int, ports: list[int]) -> int:
    """The process of one rank."""
    local_rank = 0 if asked.get("own_disks") else rank
    here = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(asked["ranks"])}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    if torch.cuda.is_available():
        return subprocess.Popen([sys.executable, __file__, json.dumps(asked), json.dumps(ports)], env=os.environ | here).pid
    if pid := os.fork():
        return pid
    os.environ |= here
    run_rank(asked, ports)


def run_rank(asked: dict, ports: list[int]) -> NoReturn:
    """Be a rank, to its end."""
    try:
        if "models" in asked:
            load(asked["models"], Path(asked["out"]), ports)
        elif asked.get("critic"):
            learn(asked)
        else:
            train(asked)
        os._exit(0)
    finally:  # the rank ends here in any case
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    if len(sys.argv) > 1:
        run_rank(*map(json.loads, sys.argv[1:]))
    gc.freeze()  # a rank that looks for garbage copies no page of what it has inherited
    for line in sys.stdin:
        asked = json.loads(line)
        ports = [free_port() for _ in asked.get("models", "1")]
        pids = [start_rank(asked, rank, ports) for rank in range(asked["ranks"])]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
