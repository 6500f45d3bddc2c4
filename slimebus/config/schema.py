"""What a run.yaml may say. Each field's docstring gives its [unit] and meaning: for flags, `slimebus init` and docs/configuration.md.

msgspec and not pydantic: it is already the wire's codec, checks types as strictly, and imports in 10 ms instead of 150,
which is what keeps `--help` instant. Option names that slime's users know are kept where the meaning is the same.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
"""The limit of a number on the wire (slimebus/bus/messages.py: Count), here and below."""
Natural = Annotated[int, Meta(ge=0, le=1 << 40)]
Steps = Annotated[int, Meta(ge=1, le=1 << 31)]
Samples = Annotated[int, Meta(ge=1, le=100_000)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 30)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
GPU = Annotated[int, Meta(ge=0, le=1023)]
Processes = Annotated[int, Meta(ge=1, le=65536)]
"""Of processes, ranks and threads."""
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
"""A thread can wait for 9.2e9."""
Fraction = Annotated[float, Meta(ge=0, le=1)]
NonNegative = Annotated[float, Meta(ge=0)]

RewardName = Literal["exact", "math", "dapo", "deepscaler", "f1", "gpqa", "ifbench", "code", "remote", "graded", "random"]
"""rollout/rewards has a file for each."""


class Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A part of the config; every field is also a command-line flag and an environment variable."""


class BrokerConfig(Section, frozen=True):
    """The broker: addresses, pacing, leases, durability."""

    bind: str = "tcp://127.0.0.1:5555"
    """[address] Where the broker listens; port 0 takes any free one. Other roles reach it with --broker."""
    hints_bind: str = ""
    """[address] Where hints are published; empty: a free port of the same interface, the same again after a restart if it is free."""
    http: str = "127.0.0.1:0"
    """[address] Where the run's web page and its metrics are served, as HOST:PORT; with port 0 any free one, after a restart the same if
    it is free. The log and RUN_DIR/page.url say which. Empty: neither."""
    max_staleness: NonNegative | Literal["auto"] = 1
    """[versions] The bound eta: no sample older than this many versions is trained. 0 is on-policy; .inf is unbounded; auto begins at
    staleness_floor, goes up when the trainer waits for workers, and down when target_ess is missed."""
    staleness_floor: Natural = 0
    """[versions] The lowest bound of max_staleness: auto."""
    staleness_ceiling: Natural = 8
    """[versions] The highest bound of max_staleness: auto."""
    target_ess: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """[ratio] With max_staleness: auto, the least effective sample size (`lag/all/ess_token`, docs/algorithms.md) that is accepted."""
    fill_first: bool = False
    """[switch] Hold a trainer's first batch until all groups are ready that max_staleness allows before it. The lag then grows by one a
    step up to max_staleness, and falls again only where workers are slower than the trainer: for experiments with staleness."""
    on_stale: Literal["requeue", "drop"] = "requeue"
    """[choice] What happens to a finished group that became too stale: sample its prompt again, or drop it."""
    lease_s: Seconds = 60.0
    """[seconds] A worker that is silent this long loses its groups, which are queued again; one that is blocked this long ends."""
    heartbeat_s: Seconds = 2.0
    """[seconds] How often each process says that it is alive."""
    max_attempts: Positive = 3
    """[attempts] Failed attempts after which a prompt becomes a dead letter."""
    buffer_capacity: Natural = 0
    """[groups] Most groups leased or waiting to be trained; 0: what max_staleness needs, or 4 batches when that is unbounded."""
    batch_tokens: Natural = 0
    """[tokens] A step is as many groups as hold at most so many tokens (prompts included). rollout_batch_size is then only a first
    estimate of their number, until groups have come; 0: a step is rollout_batch_size groups."""
    buffer_filter_path: str = ""
    """[hook] Chooses the groups of each batch among those that are ready; empty: first in, first out."""
    durability: Literal["fsync", "os", "memory"] = "fsync"
    """[choice] What a put survives: fsync, a power cut; os, a kill of the broker; memory, nothing."""
    stall_min_s: Seconds = 30.0
    """[seconds] A run without a step for less than this never counts as stalled; above it the limit is learned from the run's own pace."""
    max_message_mib: Annotated[int, Meta(ge=1, le=2048)] = 256
    """[MiB] Most that all frames of a group have. Workers give a larger one back as failed; a larger frame ends its connection."""
    max_clients: Processes = 4096
    """[processes] Most names joined at once; one more is answered `busy`. Each may have two connections: requests and hints."""
    required_fields: list[str] = []
    """[names] Fields that consumers put to groups (docs/consumers.md): a group is in no batch before it has all of them."""
    connect_timeout_s: Seconds = 120.0
    """[seconds] How long a trainer or worker tries to reach the broker before it gives up."""

    @property
    def most_stale(self) -> float:
        """The highest bound that the run may have, in versions."""
        return self.staleness_ceiling if self.max_staleness == "auto" else self.max_staleness


class DataConfig(Section, frozen=True):
    """Where prompts come from."""

    prompt_data: list[str] = []
    """[paths] Files of prompts, relative to the run.yaml: jsonl (also .gz) or parquet; `"path@[a:b]"` takes a slice
    (in quotes, as YAML reads brackets), `path*2` gives the file a weight: files then take turns in these shares; without weights they
    follow one another."""
    source_path: str = ""
    """[hook] A stateful source that gives the prompts, and hears what became of each group; prompt_data is handed to it."""
    input_key: str = "prompt"
    """[name] The key of a line that holds the prompt: text, or a list of chat messages."""
    label_key: str = "label"
    """[name] The key of a line that holds what the reward compares with."""
    metadata_key: str = "metadata"
    """[name] The key of a line that holds a map handed to hooks as it is."""
    tool_key: str = ""
    """[name] The key of a line that holds the list of tools of a chat prompt: its chat template gets it, hooks find it in the
    metadata as `tools`. Empty: no tools."""
    rollout_shuffle: bool = True
    """[switch] Visit prompts in a new seeded order each epoch."""
    num_epoch: Natural = 0
    """[epochs] Passes over the data; 0: as many as num_rollout needs."""
    apply_chat_template: bool = True
    """[switch] Prompts that are lists of messages go through the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """[map] What the chat template gets besides messages and tools, such as `enable_thinking: false`."""
    wait_for_push: bool = False
    """[switch] The run does not end when no prompt is left: it waits for prompts to be pushed. prompt_data may then be empty."""
    skip_bad_prompts: bool = False
    """[switch] Count and skip malformed lines instead of refusing to start."""


class ModelConfig(Section, frozen=True):
    """The policy."""

    hf_checkpoint: str = ""
    """[path] Directory of the initial model and its tokenizer, in Hugging Face layout; relative to the run.yaml."""
    family: str = ""
    """[name] The family (docs/models.md) that a model of an unverified model_type is trained as, at your own risk; empty: it is refused."""


class RolloutConfig(Section, frozen=True):
    """How groups are sampled and rewarded."""

    num_rollout: Steps = 100
    """[steps] Training steps of the run."""
    rollout_batch_size: Positive = 32
    """[groups] Prompts a training step."""
    n_samples_per_prompt: Samples = 8
    """[samples] Samples of each prompt: the size of a group."""
    num_steps_per_rollout: Positive = 1
    """[optimizer steps] Parts that a batch is trained in, one optimizer step each."""
    num_passes_per_rollout: Positive = 1
    """[passes] How often a batch is gone through, num_steps_per_rollout optimizer steps each time; 1: each sample is trained once."""
    rollout_temperature: NonNegative = 1.0
    """[ratio] Sampling temperature; 0 is greedy."""
    rollout_top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """[probability] Nucleus sampling."""
    rollout_top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] = -1
    """[tokens] Sample among the k most likely, at least 1; -1: all."""
    rollout_max_response_len: Tokens = 1024
    """[tokens] Most new tokens of a turn; without a generate hook, of a sample."""
    rollout_max_prompt_len: Natural = 0
    """[tokens] A training prompt that is longer is dropped; 0: any that fits the context."""
    rollout_max_context_len: Natural = 0
    """[tokens] Most tokens of a sample, prompt and turns together; the turn that reaches it is cut off. 0: the model's
    max_position_embeddings."""
    rollout_stop: list[Annotated[str, Meta(min_length=1)]] = []
    """[strings] Generation ends at any of these."""
    sampling_params: dict[str, Any] = {}
    """[map] More sampling parameters in SGLang's names: min_new_tokens, min_p, repetition_penalty, frequency_penalty, presence_penalty,
    ignore_eos, skip_special_tokens, no_stop_trim, stop_regex, regex, json_schema, ebnf."""
    rollout_stop_token_ids: list[TokenId] = []
    """[token ids] Generation ends at any of these, besides the model's own end token."""
    rm_type: RewardName = "exact"
    """[choice] Built-in reward (docs/hooks.md)."""
    rm_url: str = ""
    """[URL] Of the server that the rewards remote and graded ask."""
    reward_key: str = ""
    """[name] The key of the reward where a reward gives a map; its other values go into the sample's metadata."""
    custom_rm_path: str = ""
    """[hook] Reward of one sample, or of all samples of a group at once, instead of rm_type."""
    custom_generate_function_path: str = ""
    """[hook] Makes one sample (or several that count as one), instead of a call of the engine; called once per sample of a group."""
    environment: str = ""
    """[name] Of an environment of verifiers that makes and rewards the samples, or a TOML file of it (docs/agents.md). Its tasks are the
    prompts where data.prompt_data is empty, and `environment` names them there and in eval.datasets."""
    dynamic_sampling_filter_path: str = ""
    """[hook] Keeps or drops a finished group; a dropped one is counted and replaced by another prompt. `check_reward_nonzero_std`
    is built in: it drops groups with equal rewards."""
    hooks_path: str = ""
    """[hook] A class with any of after_generate, is_trained, on_group, log and evaluate (docs/hooks.md)."""
    dynamic_sampling_limit: Positive = 1024
    """[groups] When so many in a row were dropped by the filter and none was kept, the run stops with an error that says so."""
    over_sampling_batch_size: Natural = 0
    """[groups] Prompts started for each training step, at least rollout_batch_size; the first ones done are trained. The others
    are trained in the next step while they are fresh enough, else they follow on_stale; 0: as many as are trained."""
    reward_timeout_s: Seconds = 60.0
    """[seconds] A reward that takes longer marks its sample failed."""
    mask_offpolicy_in_partial_rollout: bool = False
    """[switch] Tokens of a continued sample that were made before its present lease are context, and not trained. With
    over_sampling_batch_size, groups in flight that a batch leaves behind too old for the next are then recalled and continued."""
    generate_timeout_s: Seconds = 600.0
    """[seconds] A group that takes longer to sample, rewards aside, is given back with what there is of it, and continued; it is a failed
    attempt where nothing was made, or a hook makes it."""
    drain_timeout_s: Seconds = 2.0
    """[seconds] How long a worker that has to stop may take to hand over the samples it has begun."""
    max_running_groups: Processes = 64
    """[groups] Most groups of n_samples_per_prompt samples that a worker samples at once, while at most as many wait for their rewards."""

    @property
    def num_updates_per_rollout(self) -> int:
        """Optimizer steps on a batch, over all passes."""
        return self.num_steps_per_rollout * self.num_passes_per_rollout

    @property
    def sampling(self) -> dict[str, Any]:
        """The training sampling parameters, in SGLang's names."""
        chosen: dict[str, Any] = {"temperature": self.rollout_temperature, "top_p": self.rollout_top_p}
        chosen |= {"max_new_tokens": self.rollout_max_response_len}
        if self.rollout_top_k > 0:
            chosen["top_k"] = self.rollout_top_k
        given = {"stop": list(self.rollout_stop), "stop_token_ids": list(self.rollout_stop_token_ids)}
        return chosen | {name: value for name, value in given.items() if value} | self.sampling_params


class MoreSampling(msgspec.Struct, forbid_unknown_fields=True):
    """What rollout.sampling_params may say; None: not given."""

    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stop_regex: str | list[str] | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None


EVAL_SAMPLING = ("top_p", "top_k", "stop", "stop_token_ids", *MoreSampling.__struct_fields__)
"""What an evaluation may set in `sampling`."""


class EngineConfig(Section, frozen=True):
    """The inference engine of a worker."""

    engine: Literal["cpu", "sglang", "none"] = "cpu"
    """[choice] cpu: the embedded one, a child process; sglang: real SGLang, a child process; none: hooks need no engine (SFT)."""
    engine_url: list[str] = []
    """[URLs] Addresses of running engines with SGLang's HTTP API, instead of starting one."""
    attach_hosts: list[str] = []
    """[hosts] Where `slimebus engines attach` may take engines from, besides this machine's loopback and the hosts of engine_url: they get
    the weights and engine_api_key."""
    engine_api_key: str = ""
    """[key] That running engines ask for (SGLang's --api-key), and those started here: empty gives each a random one. Better by environment
    variable: SLIMEBUS_ENGINE_ENGINE_API_KEY."""
    engine_python: str = ""
    """[path] The Python that has SGLang installed; empty: this one."""
    num_engines: Annotated[int, Meta(ge=0, le=1024)] = 0
    """[engines] That each worker starts; 0: as many as its GPUs hold, or 1 where engine.gpus and CUDA_VISIBLE_DEVICES name none."""
    gpus: list[GPU] = []
    """[numbers] GPUs of this machine for engines; `slimebus up` divides them among its workers. Empty: those of CUDA_VISIBLE_DEVICES."""
    sglang_config: str = ""
    """[path] YAML file of several models and server groups (docs/cluster.md); relative to the run.yaml. Empty: the policy alone."""
    sglang_server_concurrency: Positive = 512
    """[requests] Most at one engine at once; others wait in the worker."""
    use_router: bool = False
    """[switch] Start a sglang-router in front of the policy's engines, and sample through it."""
    engine_threads: Processes = 1
    """[threads] Of the embedded engine."""
    pause_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """[choice] How running requests pass a weight update: keep their KV cache, recompute it, or end as partial."""
    weight_route: Literal["auto", "disk", "broadcast"] = "auto"
    """[choice] How engines get weights: disk: a directory in shared memory, or one that both hosts see; broadcast: over the network."""


class WeightsConfig(Section, frozen=True):
    """How new weights reach the engines."""

    update_weights_interval: Positive = 1
    """[steps] Training steps a version."""
    weights_dir: str = ""
    """[path] Directory or mounted bucket through which workers get weights, instead of from the trainer's weight server; each node may
    mount it elsewhere. Relative to the run.yaml."""
    weights_bind: str = "tcp://127.0.0.1:0"
    """[address] Where the trainer serves weights; the i-th publishing rank takes the i-th port from here, with port 0 any free one."""
    weights_advertise: str = ""
    """[host] The host name by which workers reach the weight server; empty: the bound one, or this machine's address towards the broker."""
    fanout_bind: str = ""
    """[address] Where a worker passes weights on to others, such as tcp://0.0.0.0:0; others get the address bound, or for 0.0.0.0 this
    machine's on the way to the broker. Empty: it does not."""
    weights_shm: str = "/dev/shm"
    """[path] Memory-backed directory through which a worker hands weights to its engine."""


class EvalDataset(Section, frozen=True):
    """One named evaluation: its own data, sampling and reward."""

    path: str
    """[path] A jsonl or parquet file, optionally a slice `"path@[a:b]"`; relative to the run.yaml."""
    n_samples_per_eval_prompt: Samples = 1
    """[samples] Of each prompt."""
    temperature: NonNegative = 0.0
    """[ratio] 0 is greedy."""
    max_response_len: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    """[tokens] Most new tokens; 0: rollout_max_response_len."""
    sampling: dict[str, bool | int | float | str | list[str | int]] = {}
    """[map] Other sampling parameters in SGLang's names, such as top_p, top_k and stop; those not given are those of training."""
    rm_type: Literal[RewardName, ""] = ""
    """[choice] Built-in reward; empty: the training reward."""
    custom_rm_path: str = ""
    """[hook] Reward of one sample; empty: the training reward."""

    @property
    def own_sampling(self) -> dict[str, Any]:
        """What differs from the training sampling parameters."""
        most = {"max_new_tokens": self.max_response_len} if self.max_response_len else {}
        return {"temperature": self.temperature} | most | self.sampling


class EvalConfig(Section, frozen=True):
    """Evaluation while the run goes on."""

    eval_interval: Natural = 0
    """[versions] Evaluate every so many versions; 0: only before the first step and after the last."""
    skip_eval_before_train: bool = False
    """[switch] No evaluation of the initial model."""
    datasets: dict[str, EvalDataset] = {}
    """[map] Name to dataset."""


class AlgorithmConfig(Section, frozen=True):
    """The algorithm, its corrections and terms (docs/algorithms.md)."""

    advantage_estimator: str = "grpo"
    """[name] The algorithm: one of docs/algorithms.md, such as grpo and sft, or your own by import path, `file.py:Class`."""
    corrections: list[str] = []
    """[names] Weights for samples of another policy, multiplied: those of docs/algorithms.md, such as tis, or your own by import path."""
    loss_aggregation: Literal["", "token", "sequence", "group", "constant"] = ""
    """[choice] How the losses of tokens become one: mean over tokens, over trajectories of their means, over groups of theirs, or the sum
    by number of trajectories x rollout_max_response_len; empty: the algorithm's own."""
    use_rollout_logprobs: bool = True
    """[switch] The ratio's old logprobs are the sampler's; false: the trainer's own, from before the batch's first optimizer step."""
    kl_loss_coef: NonNegative = 0.0
    """[weight] Of the KL to the reference model in the loss; 0 here and in kl_coef: no reference model is held."""
    kl_coef: NonNegative = 0.0
    """[weight] Of the KL to the reference model in the reward, instead of in the loss."""
    ref_update_interval: Natural = 0
    """[steps] The policy becomes the reference model every so many steps; 0: the reference stays the initial model."""
    kl_loss_type: Literal["", "k1", "k2", "k3", "unbiased"] = ""
    """[choice] The KL estimator; unbiased (in the loss): k3 times p_new / p_rollout; empty: k1 in the reward, k3 in the loss."""
    entropy_coef: NonNegative = 0.0
    """[weight] Of the entropy bonus."""
    settings: dict[str, Any] = {}
    """[map] Settings of the chosen algorithm and corrections (docs/algorithms.md); on the command line flags of their own."""

    @property
    def is_supervised(self) -> bool:
        """Whether the run learns demonstrations, so that its signal is the loss and not the reward."""
        return self.advantage_estimator == "sft"


class OptimizerConfig(Section, frozen=True):
    """Adam and its schedule; more under `megatron`, such as `weight_decay` (0 unless it is given)."""

    lr: NonNegative = 1e-6
    """[per step] Peak learning rate."""
    min_lr: NonNegative = 0.0
    """[per step] Where the decay ends."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """[choice] Shape of the decay."""
    lr_warmup_iters: Natural = 0
    """[steps] Linear warm-up; the first step has lr / lr_warmup_iters."""
    lr_decay_iters: Natural = 0
    """[steps] Where the decay reaches min_lr; 0: the last optimizer step of the run."""
    adam_beta1: Fraction = 0.9
    """[ratio] Decay of the first moment."""
    adam_beta2: Fraction = 0.98
    """[ratio] Decay of the second moment."""
    clip_grad: NonNegative = 1.0
    """[norm] Largest gradient norm; 0: no clipping."""


class TrainerConfig(Section, frozen=True):
    """The trainer: micro-batches, layout, checkpoints."""

    max_tokens_per_gpu: Positive = 8192
    """[tokens] Most tokens of a packed micro-batch on one rank."""
    nproc_per_node: Processes = 1
    """[processes] Trainer ranks on each node (docs/megatron.md)."""
    gpus: list[GPU] = []
    """[numbers] GPUs of this machine for the trainer's ranks, one each, and for a critic's under `slimebus up`. Empty: those of
    CUDA_VISIBLE_DEVICES."""
    tensor_model_parallel_size: Processes = 1
    """[ranks] That split each matrix."""
    pipeline_model_parallel_size: Processes = 1
    """[ranks] That split the layers."""
    context_parallel_size: Processes = 1
    """[ranks] That split each sequence."""
    sequence_parallel: bool = False
    """[switch] Split activations outside matrices too (with tensor parallelism)."""
    params_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """[choice] Of the trained parameters; auto: bfloat16 on CUDA (with fp32 masters), float32 on CPUs. Published weights are always
    bfloat16."""
    train_threads: Processes = 1
    """[threads] CPU threads of each rank."""
    save_interval: Natural = 50
    """[steps] Write a checkpoint every so many steps, and at the end; 0: only at the end."""
    keep_checkpoints: Positive = 2
    """[checkpoints] Older ones are deleted."""
    save_hf: str = ""
    """[path] Write the final model here in Hugging Face layout; relative to run_dir."""
    stop_grace_s: Seconds = 25.0
    """[seconds] After SIGTERM or Ctrl-C: how long the trainer may take to finish its step and save, less than what then sends SIGKILL
    allows (Slurm: 30 s unless its KillWait says otherwise). Steps that it does not save are trained again."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """[choice] When the loss or gradient of an optimizer step is not finite: skip that step and count it (8 in a row end the run), or
    stop the run at once. It is never applied."""
    mismatch_interval: Natural = 0
    """[steps] Every so many steps some stale samples are recomputed under the version that made them, which tells the engine's error from
    staleness; 0: never. Above 0 each gradient's cosine with the one before is reported too, for one more float32 copy of the gradients."""
    dump_samples: Natural = 0
    """[samples] Keep the newest so many trained samples in RUN_DIR/samples, which `slimebus view` shows and `slimebus trainer --replay`
    trains again; 0: none."""
    tensorboard: bool = True
    """[switch] Write TensorBoard files beside the JSONL metrics."""
    wandb: bool = False
    """[switch] Tell W&B the same (`slimebus[wandb]`); its own variables say where, such as WANDB_PROJECT and WANDB_MODE=offline."""


class SecurityConfig(Section, frozen=True):
    """Keys (docs/security.md)."""

    keys: str = ""
    """[path] Folder of keys made by `slimebus keys init`, or one key file where the folder has several of a role; in a file relative to
    the run.yaml. Empty: no keys, and nothing listens beyond this machine."""
    insecure: bool = False
    """[switch] Listen beyond this machine without keys: everyone who reaches the ports can read everything and take part."""


class RunConfig(Section, frozen=True):
    """One run."""

    name: str = "run"
    """[name] Of the run, in logs and plots."""
    run_dir: str = ""
    """[path] Where everything the run makes is kept; in a file relative to the run.yaml. Empty: runs/NAME in the current directory."""
    seed: Natural = 0
    """[number] Of data order, sampling and initialisation."""
    broker: BrokerConfig = BrokerConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    security: SecurityConfig = SecurityConfig()
    megatron: dict[str, Any] = {}
    """[map] Any field of megatron-core's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig, or Megatron-LM's spelling
    of it (docs/megatron.md). `expert_tensor_parallel_size` is 1 unless it is given."""
    sglang: dict[str, Any] = {}
    """[map] Any argument of the SGLang server, with or without dashes."""
    router: dict[str, Any] = {}
    """[map] Any argument of sglang-router, with or without dashes."""


SECTIONS: dict[str, type[Section]] = {f.name: type(f.default) for f in msgspec.structs.fields(RunConfig) if isinstance(f.default, Section)}
OPEN_MAPS = ("megatron", "sglang", "router", "algorithm.settings")
"""Maps with keys of another project, or of plug-ins."""


@functools.cache
def paths() -> dict[str, FieldInfo]:
    """Every dotted name of a plain field (`broker.bind`, `seed`), in file order."""
    found = {}
    for field in msgspec.structs.fields(RunConfig):
        if field.name in SECTIONS:
            inner = {f"{field.name}.{inner.name}": inner for inner in msgspec.structs.fields(SECTIONS[field.name])}
            found.update({name: info for name, info in inner.items() if name not in OPEN_MAPS})
        elif field.name not in OPEN_MAPS:
            found[field.name] = field
    return found


@functools.cache
def flag_of(name: str) -> str:
    """The flag of a field without dashes: its last word, after its section's where two sections have one of that name."""
    field = name.rpartition(".")[2]
    is_alone = sum(other.rpartition(".")[2] == field for other in paths()) <= 1
    return (field if is_alone else name.replace(".", "_")).replace("_", "-")


class FieldDoc(msgspec.Struct, frozen=True):
    """One field: its dotted name, unit, meaning and default as it would be written in YAML."""

    name: str
    unit: str
    meaning: str
    default: str


@functools.cache
def docstrings(module: ModuleType) -> dict[tuple[str, str], str]:
    """(class, field) -> the string that follows the field in this module."""
    found = {}
    for cls in ast.parse(inspect.getsource(module)).body:
        if isinstance(cls, ast.ClassDef):
            for field, doc in zip(cls.body, cls.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                    found[cls.name, ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found


def fields_of(cls: type[msgspec.Struct], prefix: str = "") -> list[FieldDoc]:
    """The documented plain fields of a section, or of any struct with docstrings for its fields."""
    docs = []
    for field in msgspec.structs.fields(cls):
        doc = docstrings(sys.modules[cls.__module__]).get((cls.__name__, field.name), "")
        unit, _, meaning = doc.removeprefix("[").partition("] ")
        docs.append(FieldDoc(f"{prefix}{field.name}", unit.rstrip("]"), meaning, _default(field)))
    return docs


def _default(field: FieldInfo) -> str:
    """As it would be written in YAML."""
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def sections() -> Iterator[tuple[str, type[msgspec.Struct], list[FieldDoc]]]:
    """(name, class, fields) of each section, the top level first under the empty name."""
    top = [f for f in fields_of(RunConfig) if f.name not in SECTIONS]
    yield "", RunConfig, top
    for name, cls in SECTIONS.items():
        yield name, cls, fields_of(cls, f"{name}.")


REWARD_SPREAD = "check_reward_nonzero_std"
"""The built-in dynamic sampling filter, by the name that slime's users know: groups with equal rewards are dropped."""


def is_reward_spread(path: str) -> bool:
    """True for the built-in filter, also as slime's own import path; the broker applies it, and no worker loads it."""
    return path.rpartition(":")[2].rpartition(".")[2] == REWARD_SPREAD and ".py:" not in path
