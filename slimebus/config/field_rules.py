"""What no single field can say: rules between fields. Each problem names the fields, their values and the remedy."""

import math
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from slimebus.bus.errors import UsageError
from slimebus.bus.messages import MAX_BATCH_SIZE
from slimebus.config.convert import nearest_of
from slimebus.config.engine_plan import placement_problems
from slimebus.config.schema import EVAL_SAMPLING, REWARD_SPREAD, MoreSampling, RolloutConfig, RunConfig, is_reward_spread
from slimebus.security.exposure import check_bind

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"[^\s/:]+|\[[^\]\s]+\]")


def rule_problems(config: RunConfig) -> list[str]:
    """Every rule that the config of any process breaks, a sentence each."""
    rules = (
        _run_problems,
        _address_problems,
        _broker_problems,
        _rollout_problems,
        _parallel_problems,
        _engine_and_eval_problems,
        placement_problems,
    )
    return [problem for rule in rules for problem in rule(config)]


def evaluation_problems(config: RunConfig) -> Iterator[str]:
    """Evaluations that would never end, if this is the config of the whole run and not of one worker.

    A worker without an engine is leased no evaluation, as it serves no version; it may stand beside others that have one.
    """
    if config.engine.engine == "none" and config.eval.datasets:
        remedy = "set engine.engine (a worker of its own may be started with --engine none), or remove eval.datasets"
        names = ", ".join(config.eval.datasets)
        yield f"eval.datasets {names} need an engine that serves the version, and engine.engine is none; {remedy}"


def _run_problems(config: RunConfig) -> Iterator[str]:
    o, updates, eta = config.optimizer, config.rollout.num_rollout * config.rollout.num_updates_per_rollout, config.broker.max_staleness
    last = o.lr_decay_iters or updates
    if not NAME.fullmatch(config.name):
        yield f"name: {config.name[:80]!r}; expected 1 to 64 letters, digits, dots, dashes and underscores: it names the run's folder"
    if eta != "auto" and not math.isinf(eta) and eta != int(eta):
        yield f"broker.max_staleness: {eta}; expected a whole number of versions, .inf for no bound, or auto"
    if (low := config.broker.staleness_floor) > (high := config.broker.staleness_ceiling):
        yield f"broker.staleness_floor: {low} is above broker.staleness_ceiling {high}"
    if 0 < (kept := config.trainer.dump_samples) < (group := config.rollout.n_samples_per_prompt):
        yield f"trainer.dump_samples: {kept}; groups are kept whole, so give 0 for none or at least n_samples_per_prompt, {group}"
    if o.lr_decay_style != "constant" and o.lr_warmup_iters > last:
        remedy = "warm up for fewer, or set optimizer.lr_decay_iters"
        yield f"optimizer.lr_warmup_iters: {o.lr_warmup_iters} is beyond the end of the decay at {last} steps; {remedy}"


def _address_problems(config: RunConfig) -> Iterator[str]:
    b, w = config.broker, config.weights
    binds = {"broker.bind": b.bind, "broker.hints_bind": b.hints_bind}
    binds |= {"broker.http": b.http and f"tcp://{b.http}"}
    binds |= {"weights.weights_bind": w.weights_bind, "weights.fanout_bind": w.fanout_bind}
    for field, address in binds.items():
        try:
            if address or field in ("broker.bind", "weights.weights_bind"):
                check_bind(address, field, has_keys=True, insecure=True)
        except UsageError as bad:
            yield bad.text
    if w.weights_advertise and not HOST.fullmatch(w.weights_advertise):
        yield f"weights.weights_advertise: {w.weights_advertise!r}; expected a host name or address alone, without tcp:// and port"
    for url in config.engine.engine_url:
        if not _is_url(url):
            yield f"engine.engine_url: {url!r}; expected http://HOST:PORT"
    for host in config.engine.attach_hosts:
        if not HOST.fullmatch(host):
            yield f"engine.attach_hosts: {host!r}; expected a host name or address alone, without http:// and port"


def _broker_problems(config: RunConfig) -> Iterator[str]:
    b, size = config.broker, config.rollout.rollout_batch_size
    if b.lease_s <= b.heartbeat_s:
        yield f"broker.lease_s: {b.lease_s:g} is not above heartbeat_s {b.heartbeat_s:g}, so every lease would expire"
    if 0 < b.buffer_capacity < size:
        yield f"broker.buffer_capacity: {b.buffer_capacity} is below rollout.rollout_batch_size {size}; no batch would fill"
    if size > MAX_BATCH_SIZE:
        yield f"rollout.rollout_batch_size: {size} groups; at most {MAX_BATCH_SIZE} fit one batch reply"


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", text)
    except ValueError:  # its port is no number of 16 bits
        return False


def _rollout_problems(config: RunConfig) -> Iterator[str]:
    r = config.rollout
    size, parts, over = r.rollout_batch_size, r.num_steps_per_rollout, r.over_sampling_batch_size
    if size % parts:
        yield f"rollout.rollout_batch_size: {size} groups do not divide into num_steps_per_rollout {parts} parts"
    if over and over < size:
        why = "a batch would never fill; expected at least as many, or 0"
        yield f"rollout.over_sampling_batch_size: {over} is below rollout_batch_size {size}; {why}"
    if is_reward_spread(r.dynamic_sampling_filter_path) and r.n_samples_per_prompt < 2:
        why = "as one reward has no spread; sample 2 or more"
        every = f"every group of n_samples_per_prompt {r.n_samples_per_prompt}"
        yield f"rollout.dynamic_sampling_filter_path: {REWARD_SPREAD} drops {every}, {why}"
    yield from _more_sampling_problems(r)
    if r.rollout_top_k == 0:
        yield "rollout.rollout_top_k: 0; expected at least 1, or -1 for all tokens"
    rewards = {"rollout.custom_rm_path": r.custom_rm_path}
    rewards |= {f"eval.datasets.{name}.custom_rm_path": dataset.custom_rm_path for name, dataset in config.eval.datasets.items()}
    for field, path in rewards.items():
        if path and (is_reward_spread(path) or path in (r.dynamic_sampling_filter_path, config.broker.buffer_filter_path)):
            yield f"{field}: {path} is a filter of groups and no reward; give it as rollout.dynamic_sampling_filter_path"


def _more_sampling_problems(r: RolloutConfig) -> Iterator[str]:
    """Of rollout.sampling_params: unknown names, values out of range, and what has a field of its own."""
    own = {"max_new_tokens": "rollout_max_response_len"}
    own |= {name: f"rollout_{name}" for name in ("temperature", "top_p", "top_k", "stop", "stop_token_ids")}
    for name, value in r.sampling_params.items():
        known = MoreSampling.__struct_fields__
        if name in own:
            yield f"rollout.sampling_params.{name}: set rollout.{own[name]} instead"
        elif name not in known:
            yield f"rollout.sampling_params.{name}: no such sampling parameter{nearest_of(name, known)}"
        else:
            try:
                msgspec.convert({name: value}, MoreSampling)
            except msgspec.ValidationError as bad:
                yield f"rollout.sampling_params.{name}: {value!r}; {str(bad).partition(' - at')[0]}"
    if (least := r.sampling_params.get("min_new_tokens")) and isinstance(least, int) and least > r.rollout_max_response_len:
        yield f"rollout.sampling_params.min_new_tokens: {least} is above rollout_max_response_len {r.rollout_max_response_len}"


def _parallel_problems(config: RunConfig) -> Iterator[str]:
    t, r = config.trainer, config.rollout
    tensor, pipeline, context = t.tensor_model_parallel_size, t.pipeline_model_parallel_size, t.context_parallel_size
    here, ranks, samples = t.nproc_per_node, tensor * pipeline * context, r.rollout_batch_size * r.n_samples_per_prompt
    if here < ranks and ranks % here:
        yield f"trainer.nproc_per_node: {here} does not divide the {ranks} ranks of one model replica"
    if here >= ranks and here % ranks:
        yield f"trainer.nproc_per_node: {here} is no multiple of tensor {tensor} x pipeline {pipeline} x context {context} = {ranks} ranks"
    if samples % max(1, here // ranks):
        product = f"rollout.rollout_batch_size {r.rollout_batch_size} x n_samples_per_prompt {r.n_samples_per_prompt}"
        yield f"{product} = {samples} samples do not divide over {here // ranks} data-parallel ranks"
    if t.sequence_parallel and tensor == 1:
        yield "trainer.sequence_parallel: true with tensor_model_parallel_size 1; raise the size or turn it off"


def _engine_and_eval_problems(config: RunConfig) -> Iterator[str]:
    if config.rollout.environment and config.rollout.custom_generate_function_path:
        yield "rollout.environment and rollout.custom_generate_function_path both make the samples; remove one of them"
    if config.engine.engine == "none" and not config.rollout.custom_generate_function_path:
        yield "engine.engine is none, so rollout.custom_generate_function_path must make the samples"
    if config.engine.engine == "none" and config.engine.engine_url:
        yield "engine.engine_url is given although engine.engine is none; remove one of the two"
    for name, dataset in config.eval.datasets.items():
        for unknown in dataset.sampling.keys() - set(EVAL_SAMPLING):
            yield f"eval.datasets.{name}.sampling: no sampling parameter {unknown!r}; expected one of {', '.join(EVAL_SAMPLING)}"
    if config.eval.eval_interval and not config.eval.datasets:
        yield "eval.eval_interval is set but eval.datasets is empty; name at least one dataset or set it to 0"
