"""What no single field can say: rules between fields. Each failure names the fields, their values and the remedy."""

import math

from slimebus.config.schema import RunConfig
from slimebus.dynamic_filter import REWARD_SPREAD, is_reward_spread
from slimebus.errors import ConfigError


def check(config: RunConfig) -> None:
    """Raise ConfigError for the first rule that the config breaks."""
    for rule in (_staleness, _batches, _sampling, _parallel, _schedule, _tis, _engine, _eval, _weights):
        rule(config)


def _staleness(config: RunConfig) -> None:
    eta = config.broker.max_staleness
    if not math.isinf(eta) and eta != int(eta):
        raise ConfigError(f"broker.max_staleness: {eta}; expected a whole number of versions, or .inf for no bound")


def _batches(config: RunConfig) -> None:
    r = config.rollout
    samples = r.rollout_batch_size * r.n_samples_per_prompt
    if r.rollout_batch_size % r.num_steps_per_rollout:
        raise ConfigError(
            f"rollout.rollout_batch_size: {r.rollout_batch_size} groups do not divide into "
            f"num_steps_per_rollout {r.num_steps_per_rollout} parts"
        )
    if r.global_batch_size and samples != r.global_batch_size * r.num_steps_per_rollout:
        raise ConfigError(
            f"rollout.global_batch_size: rollout_batch_size {r.rollout_batch_size} x "
            f"n_samples_per_prompt {r.n_samples_per_prompt} = {samples} "
            f"must equal global_batch_size {r.global_batch_size} x num_steps_per_rollout {r.num_steps_per_rollout} = "
            f"{r.global_batch_size * r.num_steps_per_rollout}"
        )


def _sampling(config: RunConfig) -> None:
    r = config.rollout
    if r.over_sampling_batch_size and r.over_sampling_batch_size < r.rollout_batch_size:
        raise ConfigError(
            f"rollout.over_sampling_batch_size: {r.over_sampling_batch_size} is below rollout_batch_size {r.rollout_batch_size}; "
            "a batch would never fill; expected at least as many, or 0"
        )
    if is_reward_spread(r.dynamic_sampling_filter_path) and r.n_samples_per_prompt < 2:
        raise ConfigError(
            f"rollout.dynamic_sampling_filter_path: {REWARD_SPREAD} drops every group of n_samples_per_prompt "
            f"{r.n_samples_per_prompt}, as one reward has no spread; sample 2 or more"
        )


def _parallel(config: RunConfig) -> None:
    t = config.trainer
    ranks = t.tensor_model_parallel_size * t.pipeline_model_parallel_size * t.context_parallel_size
    if t.nproc_per_node < ranks and ranks % t.nproc_per_node:
        raise ConfigError(f"trainer.nproc_per_node: {t.nproc_per_node} does not divide the {ranks} ranks of one model replica")
    if t.nproc_per_node >= ranks and t.nproc_per_node % ranks:
        raise ConfigError(
            f"trainer.nproc_per_node: {t.nproc_per_node} is no multiple of tensor {t.tensor_model_parallel_size} x "
            f"pipeline {t.pipeline_model_parallel_size} x context {t.context_parallel_size} = {ranks} ranks"
        )
    data_parallel = max(1, t.nproc_per_node // ranks)
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    if samples % data_parallel:
        raise ConfigError(
            f"rollout.rollout_batch_size {config.rollout.rollout_batch_size} x n_samples_per_prompt "
            f"{config.rollout.n_samples_per_prompt} = {samples} samples do not divide over {data_parallel} data-parallel ranks"
        )


def _schedule(config: RunConfig) -> None:
    o = config.optimizer
    updates = config.rollout.num_rollout * config.rollout.num_steps_per_rollout
    if o.lr_decay_style != "constant" and o.lr_warmup_iters > (o.lr_decay_iters or updates):
        raise ConfigError(
            f"optimizer.lr_warmup_iters: {o.lr_warmup_iters} is beyond the end of the decay at {o.lr_decay_iters or updates} steps; "
            "warm up for fewer, or set optimizer.lr_decay_iters"
        )


def _tis(config: RunConfig) -> None:
    a = config.algorithm
    if a.use_tis and a.use_rollout_logprobs:
        raise ConfigError("algorithm.use_tis needs recomputed old logprobs; set algorithm.use_rollout_logprobs: false")


def _engine(config: RunConfig) -> None:
    if config.engine.engine == "none" and not config.rollout.custom_generate_function_path:
        raise ConfigError("engine.engine is none, so rollout.custom_generate_function_path must make the samples")
    if config.engine.engine == "none" and config.engine.engine_url:
        raise ConfigError("engine.engine_url is given although engine.engine is none; remove one of the two")


def _eval(config: RunConfig) -> None:
    if config.eval.eval_interval and not config.eval.datasets:
        raise ConfigError("eval.eval_interval is set but eval.datasets is empty; name at least one dataset or set it to 0")


def check_evaluations(config: RunConfig) -> None:
    """Raise ConfigError for evaluations that would never end, if this is the config of the whole run and not of one worker.

    A worker without an engine is leased no evaluation, as it serves no version; it may stand beside others that have one.
    """
    if config.engine.engine == "none" and config.eval.datasets:
        raise ConfigError(
            f"eval.datasets {', '.join(config.eval.datasets)} need an engine that serves the version, and engine.engine is none; "
            "set engine.engine (a worker of its own may be started with --engine none), or remove eval.datasets"
        )


def _weights(config: RunConfig) -> None:
    if config.weights.weights_transport == "disk" and not config.weights.weights_dir:
        raise ConfigError("weights.weights_dir is not set; weights_transport: disk needs a directory that trainer and workers share")
