"""Held-out scores of a version, made by the same workers ahead of training groups.

Evaluation groups stand outside of admission, staleness and the buffer; their samples are scored and not kept.
"""

from typing import Any

import msgspec

from broker.state import transitions
from broker.state.broker_state import State
from broker.state.effects import Address, Event, Inline
from broker.state.groups import DEAD, EVAL, Group, version_range
from broker.state.records import Evaluation, Tally
from slimebus.bus.envelope import check_name
from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import NO_VERSION, Evaluate, EvaluateReply
from slimebus.bus.sample_table import CheckedGroup
from slimebus.telemetry.scores import of_attempts

AUTOMATIC = "auto/"
"""How the keys of the run's own evaluations begin."""
MAX_RUNNING = 16
MAX_DONE = 256
"""Results that are kept; the oldest goes first."""


# --- starting ---


def start_if_due(state: State) -> None:
    """Start the evaluation of the version just published, when the rules ask for one."""
    meta, rules = state.meta, state.rules
    is_first = rules.eval_first and meta.version == meta.base_version and meta.base_step == 0
    is_interval = rules.eval_interval > 0 and meta.version > 0 and meta.version % rules.eval_interval == 0
    is_last = rules.num_steps is not None and meta.version == state.version_of(rules.num_steps)
    if is_first or is_interval or is_last:
        start_automatic(state)


def running_evaluations(state: State) -> list[Evaluation]:
    """The evaluations that are not done."""
    return [evaluation for evaluation in state.evaluations.values() if not evaluation.is_done]


def start_automatic(state: State) -> None:
    """Evaluate the newest version on every held-out set, once."""
    key = f"{AUTOMATIC}{state.meta.lineage}/{state.meta.version}"
    if not state.rules.eval_datasets or state.meta.version == NO_VERSION or key in state.evaluations:
        return
    if len(running_evaluations(state)) >= MAX_RUNNING:
        state.tally(state.meta.counted, "evaluations skipped")
        state.note(f"version {state.meta.version} is not evaluated: {MAX_RUNNING} evaluations run already", is_warning=True)
    else:
        start_evaluation(state, key, list(state.rules.eval_datasets))


def start_evaluation(state: State, key: str, datasets: list[str]) -> Evaluation:
    """Queue every prompt of these held-out sets for workers that serve the newest version or a later one."""
    meta = state.meta
    tallies = {name: Tally(num_prompts=state.rules.eval_datasets[name].num_prompts) for name in datasets}
    serial, meta.next_evaluation = meta.next_evaluation, meta.next_evaluation + 1
    evaluation = Evaluation(key=key, serial=serial, lineage=meta.lineage, version=meta.version, step=meta.next_step, tallies=tallies)
    state.evaluations[key] = evaluation
    state.changed("evaluations", key)
    position = evaluation.serial << 40
    for name, tally in tallies.items():
        for row in range(tally.num_prompts):
            group = Group(id=f"eval/{evaluation.serial}/{name}/{row}", position=position, kind=EVAL, evaluation=key, dataset=name, row=row)
            state.enter(group, "eval source>queued started")
            position += 1
    return evaluation


def evaluate(state: State, event: Event, request: Evaluate) -> None:
    """Start an evaluation on request, or answer with one of the same key."""
    check_name("evaluate: key", request.key)
    evaluation = state.evaluations.get(request.key)
    if evaluation is None:
        evaluation = _start_requested(state, request)
    if evaluation.is_done or request.wait_s == 0:
        _send_reply(state, event.to, evaluation)
        return
    key = (event.sender, event.to.request)
    if key not in state.waiting_evaluations:
        state.check_may_wait(state.waiting_evaluations, event.sender)
    state.waiting_evaluations.park(key, event, request, state.now)


def _start_requested(state: State, request: Evaluate) -> Evaluation:
    if state.is_finished:
        remedy = "a checkpoint is evaluated without a run: slimebus eval --model RUN_DIR/checkpoints/step_N"
        raise SlimebusError(f"evaluate: the run is finished and its workers leave; {remedy}", code="finished")
    known = state.rules.eval_datasets
    datasets = request.datasets or list(known)
    unknown = [name for name in datasets if name not in known]
    if unknown or not datasets:
        text = f"evaluate: no held-out set {unknown[0][:64]!r}" if unknown else "evaluate: this run has no held-out set"
        raise SlimebusError(f"{text}; known: {', '.join(known) or 'none'}", code="no_dataset")
    if state.meta.version == NO_VERSION:
        raise SlimebusError("evaluate: no version is published yet", code="no_version", retryable=True)
    if len(running_evaluations(state)) >= MAX_RUNNING:
        raise SlimebusError(f"evaluate: {MAX_RUNNING} evaluations run already", code="busy", retryable=True)
    return start_evaluation(state, request.key, datasets)


# --- scoring ---


def score_group(state: State, group: Group, made: CheckedGroup) -> None:
    """Add the samples of one prompt to the tally of its held-out set."""
    tally = state.evaluations[group.evaluation].tallies[group.dataset]
    rewards = (None if sample.has_failed else sample.reward for sample in made.samples)
    tally.add(*of_attempts(made.table.trajectory or range(len(made.samples)), rewards))
    oldest, newest = version_range([sample for sample in made.samples if not sample.has_failed])
    tally.newest_version = max(tally.newest_version, newest)
    tally.oldest_version = min((v for v in (tally.oldest_version, oldest) if v != NO_VERSION), default=NO_VERSION)
    _close_group(state, group, "scored")


def retry(state: State, group: Group, cause: str, reason: str) -> None:
    """An attempt failed: another, or after too many of them its samples count as failed."""
    if transitions.counted_transition(state, group, cause).phase != DEAD:
        transitions.apply_transition(state, group, "returned", reason)
        return
    give_up_group(state, group, reason)


def give_up_group(state: State, group: Group, reason: str) -> None:
    """Count the samples of a prompt as failed."""
    state.evaluations[group.evaluation].tallies[group.dataset].add([], state.rules.eval_datasets[group.dataset].num_samples)
    _close_group(state, group, f"given up: {reason}")


def recover_group(state: State, group_id: str, reason: str) -> None:
    """The record of an evaluation group is lost: its samples count as failed."""
    for evaluation in running_evaluations(state):
        dataset = next((name for name in evaluation.tallies if group_id.startswith(f"eval/{evaluation.serial}/{name}/")), None)
        if dataset is not None:
            group = Group(id=group_id, position=0, kind=EVAL, evaluation=evaluation.key, dataset=dataset)
            state.groups.add(group)
            give_up_group(state, group, reason)


def _close_group(state: State, group: Group, reason: str) -> None:
    evaluation = state.evaluations[group.evaluation]
    state.retire(group, reason)
    state.changed("evaluations", evaluation.key)
    if all(t.num_done >= t.num_prompts for t in evaluation.tallies.values()):
        _complete_evaluation(state, evaluation, "")


def _complete_evaluation(state: State, evaluation: Evaluation, reason: str) -> None:
    evaluation.is_done, evaluation.reason = True, reason
    state.changed("evaluations", evaluation.key)
    state.timers.cancel(("unserved evaluation", evaluation.key))
    for row in results(evaluation):
        state.record({"evaluation": evaluation.key, **row})
        mean = "no score" if row["mean_reward"] is None else f"{row['mean_reward']:.4f}"
        state.note(f"evaluation of {row['dataset']} at version {row['version']}: {mean} over {row['num_samples']} samples")
    for key, waiting in list(state.waiting_evaluations.items()):
        if waiting.message.key == evaluation.key:
            answer_timed_out(state, key)
    done = [e for e in state.evaluations.values() if e.is_done]
    if len(done) > MAX_DONE:
        oldest = min(done, key=lambda e: e.serial).key
        del state.evaluations[oldest]
        state.changed("evaluations", oldest)


def answer_timed_out(state: State, key: tuple[str, int]) -> None:
    """Answer a waiting request with what there is."""
    waiting = state.waiting_evaluations.take_out(key)
    if waiting is not None:
        _send_reply(state, waiting.to, state.evaluations[waiting.message.key])


def cancel_impossible(state: State) -> None:
    """After a restart with other held-out sets: what can no longer be scored is ended."""
    sizes = {name: dataset.num_prompts for name, dataset in state.rules.eval_datasets.items()}
    if any(sizes.get(name) != tally.num_prompts for e in running_evaluations(state) for name, tally in e.tallies.items()):
        cancel_running(state, "the held-out sets changed")


def cancel_running(state: State, reason: str) -> None:
    """End every running evaluation."""
    for evaluation in running_evaluations(state):
        end_evaluation(state, evaluation, reason)


def end_evaluation(state: State, evaluation: Evaluation, reason: str, why: str = "") -> None:
    """End a running evaluation with what is scored so far. Its other prompts are counted under `reason`; why: the same in a sentence."""
    done, total = progress(evaluation)
    for group in [g for g in state.groups.by_id.values() if g.evaluation == evaluation.key]:
        state.retire(group, reason)
    text = f"evaluation of version {evaluation.version} ended with {done} of {total} prompts: {why or reason}"
    state.note(text, is_warning=True)
    _complete_evaluation(state, evaluation, why or reason)


# --- results ---


def results(evaluation: Evaluation) -> list[dict[str, Any]]:
    """One row for each held-out set: mean reward and pass@k, with 95% intervals."""
    about = {field: getattr(evaluation, field) for field in ("version", "lineage", "step", "reason")}
    of_set = ("num_prompts", "oldest_version", "newest_version")
    rows = ((name, tally.row() | {field: getattr(tally, field) for field in of_set}) for name, tally in evaluation.tallies.items())
    return [{"dataset": name, **about, **row} for name, row in rows]


def progress(evaluation: Evaluation) -> tuple[int, int]:
    """How many prompts are scored, and of how many."""
    return sum(t.num_done for t in evaluation.tallies.values()), sum(t.num_prompts for t in evaluation.tallies.values())


def _send_reply(state: State, to: Address, evaluation: Evaluation) -> None:
    done, total = progress(evaluation)
    reason = evaluation.reason if evaluation.is_done else f"{done} of {total} prompts of version {evaluation.version} are scored"
    state.reply(to, EvaluateReply(done=evaluation.is_done, reason=reason), [Inline(msgspec.json.encode(results(evaluation)))])
