"""Held-out scores of a version, made by the same workers ahead of training groups.

Evaluation groups stand outside of admission, staleness and the buffer; their samples are scored and not kept.
"""

import math
from typing import Any

import msgspec

from broker.state import bounds
from broker.state.effects import Event, Inline
from broker.state.groups import EVAL, Group
from broker.state.records import Evaluation, Parked, Tally
from broker.state.table import State
from broker.state.timers import bounded_wait
from slimebus.errors import ProtocolError, SlimebusError
from slimebus.interval import Z_95, wilson
from slimebus.messages import NO_VERSION, Evaluate, EvaluateReply, SampleHeader

MAX_RUNNING = 16


# --- starting ---


def start_if_due(state: State) -> None:
    """Start the evaluation of the version just published, when the rules ask for one."""
    meta, rules = state.meta, state.rules
    is_first = rules.eval_first and meta.version == meta.base_version and meta.base_step == 0
    is_interval = rules.eval_interval > 0 and meta.version > 0 and meta.version % rules.eval_interval == 0
    is_last = rules.num_steps is not None and meta.version == state.version_of(rules.num_steps)
    if is_first or is_interval or is_last:
        start_automatic(state)


def start_automatic(state: State) -> None:
    """Evaluate the newest version on every held-out set, once."""
    key = f"auto/{state.meta.lineage}/{state.meta.version}"
    if state.rules.eval_datasets and state.meta.version != NO_VERSION and key not in state.evaluations:
        start(state, key, list(state.rules.eval_datasets))


def start(state: State, key: str, datasets: list[str]) -> Evaluation:
    """Queue every prompt of these held-out sets for workers that serve the newest version or a later one."""
    meta = state.meta
    tallies = {name: Tally(num_prompts=state.rules.eval_datasets[name].num_prompts) for name in datasets}
    evaluation = Evaluation(
        key=key, serial=meta.next_evaluation, lineage=meta.lineage, version=meta.version, step=meta.next_step, tallies=tallies
    )
    meta.next_evaluation += 1
    state.evaluations[key] = evaluation
    state.changed("evaluations", key)
    position = evaluation.serial << 40
    for name, tally in tallies.items():
        for row in range(tally.num_prompts):
            group = Group(id=f"eval/{evaluation.serial}/{name}/{row}", position=position, kind=EVAL, evaluation=key, dataset=name, row=row)
            state.groups.add(group)
            state.tally(state.meta.moves, "eval source>queued started")
            state.changed("groups", group.id)
            position += 1
    return evaluation


def evaluate(state: State, event: Event, ask: Evaluate, now: float) -> None:
    """Start an evaluation on request, or answer with one of the same key."""
    if not 0 < len(ask.key) <= 128:
        raise ProtocolError("evaluate: key must have 1 to 128 characters")
    evaluation = state.evaluations.get(ask.key)
    if evaluation is None:
        evaluation = _start_asked(state, ask)
    if evaluation.is_done or not ask.wait_s > 0:
        state.reply(event.to, _reply(evaluation), [Inline(encoded_results(evaluation))])
        return
    if len(state.parked_evaluations) >= state.rules.max_parked:
        raise bounds.hit(state, "max_parked", f"{len(state.parked_evaluations)} requests wait for evaluations already")
    key = (event.sender, event.to.request)
    state.parked_evaluations[key] = Parked(to=event.to, client=event.sender, message=ask)
    state.timers.set(("parked evaluation", *key), now + bounded_wait(ask.wait_s))


def _start_asked(state: State, ask: Evaluate) -> Evaluation:
    known = state.rules.eval_datasets
    datasets = ask.datasets or list(known)
    unknown = [name for name in datasets if name not in known]
    if unknown or not datasets:
        text = f"evaluate: no held-out set {unknown[0][:64]!r}" if unknown else "evaluate: this run has no held-out set"
        raise SlimebusError(f"{text}; known: {', '.join(known) or 'none'}", code="no_dataset")
    if state.meta.version == NO_VERSION:
        raise SlimebusError("evaluate: no version is published yet", code="no_version", retryable=True)
    if sum(not e.is_done for e in state.evaluations.values()) >= MAX_RUNNING:
        raise SlimebusError(f"evaluate: {MAX_RUNNING} evaluations run already", code="busy", retryable=True)
    return start(state, ask.key, datasets)


# --- scoring ---


def score(state: State, group: Group, good: list[SampleHeader], *, num_failed: int) -> None:
    """Add the samples of one prompt to the tally of its held-out set."""
    tally = state.evaluations[group.evaluation].tallies[group.dataset]
    rewards = [s.reward for s in good if s.reward is not None]
    tally.num_samples += len(rewards)
    tally.num_failed += num_failed
    tally.total += sum(rewards)
    tally.total_squares += sum(r * r for r in rewards)
    tally.is_binary = tally.is_binary and all(r in (0.0, 1.0) for r in rewards)
    versions = [v for s in good for v, _ in s.versions if v != NO_VERSION]
    if versions:
        tally.newest_version = max(tally.newest_version, *versions)
        tally.oldest_version = min(versions) if tally.oldest_version == NO_VERSION else min(tally.oldest_version, *versions)
    _close(state, group, "scored")


def retry(state: State, group: Group, reason: str, *, counts: bool = True) -> None:
    """An attempt failed: another, or after `max_attempts` its samples count as failed."""
    group.failures += counts
    if group.failures < state.rules.max_attempts:
        state.requeue(group, reason)
        return
    state.evaluations[group.evaluation].tallies[group.dataset].num_failed += state.rules.eval_datasets[group.dataset].num_samples
    _close(state, group, f"given up: {reason}")


def _close(state: State, group: Group, reason: str) -> None:
    evaluation = state.evaluations[group.evaluation]
    evaluation.tallies[group.dataset].num_done += 1
    state.retire(group, reason)
    state.changed("evaluations", evaluation.key)
    if all(t.num_done >= t.num_prompts for t in evaluation.tallies.values()):
        _complete(state, evaluation, "")


def _complete(state: State, evaluation: Evaluation, reason: str) -> None:
    evaluation.is_done, evaluation.reason = True, reason
    state.changed("evaluations", evaluation.key)
    for row in results(evaluation):
        state.record({"evaluation": evaluation.key, **row})
    for key, parked in list(state.parked_evaluations.items()):
        if parked.message.key == evaluation.key:
            give_up(state, *key)


def give_up(state: State, name: str, request: int) -> None:
    """Answer a parked request with what there is."""
    parked = state.parked_evaluations.pop((name, request), None)
    if parked is None:
        return
    state.timers.cancel(("parked evaluation", name, request))
    evaluation = state.evaluations[parked.message.key]
    state.reply(parked.to, _reply(evaluation), [Inline(encoded_results(evaluation))])


def cancel_impossible(state: State) -> None:
    """After a restart with other held-out sets: what can no longer be scored is ended."""
    sizes = {name: dataset.num_prompts for name, dataset in state.rules.eval_datasets.items()}
    running = [e for e in state.evaluations.values() if not e.is_done]
    if any(sizes.get(name) != tally.num_prompts for e in running for name, tally in e.tallies.items()):
        cancel_running(state, "the held-out sets changed")


def cancel_running(state: State, reason: str) -> None:
    """End every running evaluation with what was scored so far."""
    for evaluation in [e for e in state.evaluations.values() if not e.is_done]:
        for group in [g for g in state.groups.by_id.values() if g.evaluation == evaluation.key]:
            state.retire(group, reason)
        state.note(f"evaluation of version {evaluation.version} ended early: {reason}", is_warning=True)
        _complete(state, evaluation, reason)


# --- results ---


def results(evaluation: Evaluation) -> list[dict[str, Any]]:
    """One row for each held-out set: mean reward over its samples with a 95% interval."""
    return [_result(evaluation, name, tally) for name, tally in evaluation.tallies.items()]


def _result(evaluation: Evaluation, name: str, tally: Tally) -> dict[str, Any]:
    n = tally.num_samples
    mean = tally.total / n if n else None
    low, high = (None, None) if mean is None else interval_95(tally)
    return {
        "dataset": name,
        "version": evaluation.version,
        "lineage": evaluation.lineage,
        "step": evaluation.step,
        "mean_reward": mean,
        "low": low,
        "high": high,
        "interval": "wilson" if tally.is_binary else "normal",
        "num_samples": n,
        "num_failed": tally.num_failed,
        "num_prompts": tally.num_prompts,
        "num_done": tally.num_done,
        "oldest_version": tally.oldest_version,
        "newest_version": tally.newest_version,
        "reason": evaluation.reason,
    }


def interval_95(tally: Tally) -> tuple[float, float]:
    """Wilson's score interval for 0/1 rewards, mean +- z s / sqrt(n) for others."""
    n, mean = tally.num_samples, tally.total / tally.num_samples
    if tally.is_binary:
        return wilson(mean, n)
    variance = max(0.0, tally.total_squares - n * mean * mean) / max(1, n - 1)
    half = Z_95 * math.sqrt(variance / n)
    return mean - half, mean + half


def encoded_results(evaluation: Evaluation) -> bytes:
    """The results as JSON."""
    return msgspec.json.encode(results(evaluation))


def _reply(evaluation: Evaluation) -> EvaluateReply:
    done = sum(t.num_done for t in evaluation.tallies.values())
    total = sum(t.num_prompts for t in evaluation.tallies.values())
    reason = evaluation.reason if evaluation.is_done else f"{done} of {total} prompts of version {evaluation.version} are scored"
    return EvaluateReply(done=evaluation.is_done, reason=reason)
