"""Resume, publish: the trainer's timeline.

A trainer that restarts from a checkpoint begins a new lineage at the step it will train next. What the broker holds is brought
back to that moment: steps before it are trained, samples that only the abandoned timeline could have made become prompts again.
"""

import math
from collections.abc import Sequence

from broker.state import batches, ending, evaluation, leases, prompts, settings, transitions
from broker.state.broker_state import State
from broker.state.clients import fence_older_trainers
from broker.state.effects import Event
from broker.state.groups import ASSIGNED, COMMITTED
from broker.state.records import Meta
from slimebus.bus.errors import ProtocolError, SlimebusError
from slimebus.bus.messages import NO_VERSION, BatchReply, Ok, Publish, Resume
from slimebus.security.exposure import is_address

MAX_LINEAGES = 64
"""Past ones that a resume is refused for."""
MAX_ADDRESS_CHARS = 1024
DISK = "file://"
"""Before the folder of a chain of delta files."""


# --- resume ---


def resume(state: State, event: Event, request: Resume) -> None:
    """Begin `lineage` at `step` with `version`. The same request repeated changes nothing."""
    meta = state.meta
    trainer = state.clients[event.sender]
    if request.lineage == meta.lineage and (trainer.name, trainer.instance) == meta.trainer:
        if (request.step, request.version) != (meta.base_step, meta.base_version):
            raise SlimebusError("resume to another step needs a new lineage", code="lineage")
        state.reply(event.to, Ok())
        return
    if request.lineage in meta.lineages:
        raise SlimebusError(f"resume: lineage {request.lineage[:8]!r} was begun before; each trainer begins one of its own", code="lineage")
    num_steps = state.rules.num_steps
    if num_steps is not None and request.step > max(num_steps, meta.next_step):
        remedy = "resume at one of its checkpoints, or give the broker the same trainer.num_rollout"
        raise SlimebusError(f"resume at step {request.step} of a run of {num_steps} steps; {remedy}", code="step")
    if 0 < request.step < meta.oldest_kept_step:
        why = f"the oldest checkpoint known here is of step {meta.oldest_kept_step}, the samples of the steps before it are freed"
        remedy = f"resume at step {meta.oldest_kept_step} or later, or at 0 to train every prompt anew"
        raise SlimebusError(f"resume at step {request.step}: {why}; {remedy}", code="step")
    fence_older_trainers(state, trainer)
    shared = _num_shared(state.meta, request)
    _begin_timeline(state, request, shared)
    meta.trainer = (trainer.name, trainer.instance)
    meta.lineages, meta.fork_steps = [*meta.lineages, request.lineage][-MAX_LINEAGES:], [*meta.fork_steps, shared][-MAX_LINEAGES:]
    state.reply(event.to, Ok())


def _num_shared(meta: Meta, request: Resume) -> int:
    """How many steps the trainer's checkpoint and the broker have in common: others may have gone back behind it and trained on since."""
    if request.parent not in meta.lineages:
        return request.step
    num_since = len(meta.lineages) - 1 - meta.lineages.index(request.parent)
    return min([request.step, *meta.fork_steps[max(0, len(meta.fork_steps) - num_since) :]])


def _begin_timeline(state: State, request: Resume, shared: int) -> None:
    meta = state.meta
    was_at, had_lineage = meta.next_step, bool(meta.lineage)
    for step in list(state.waiting_batches):
        state.answer(state.waiting_batches, step, BatchReply(step=step, reason="the trainer resumed from another step"))
    batches.free(state, math.inf)
    _accept_trained(state, request.step, shared)
    if shared < meta.oldest_kept_step:
        state.note(
            f"the samples of the {meta.oldest_kept_step} steps that a checkpoint held are freed; every prompt is trained anew",
            is_warning=True,
        )
        prompts.begin_anew(state)
    _rewind(state, shared, request.version)
    _revoke_leases(state)
    leases.rewind_partials(state, shared, request.version)
    evaluation.cancel_running(state, f"the trainer {'resumed from an earlier step' if shared < was_at else 'restarted'}")
    meta.lineage, meta.version, meta.publishers, meta.digest = request.lineage, NO_VERSION, [], ""
    meta.base_step, meta.base_version = request.step, request.version
    state.set_pace(request.step, request.version)
    batches.begin_at(state, request.step)
    ending.reopen(state)
    leases.forget_filtered(state)
    verb = f"resumes (broker was at step {was_at})" if had_lineage or request.step else "begins"
    state.note(f"trainer {verb} at step {request.step}, version {request.version}, lineage {request.lineage[:8]}")
    if was_at and not request.step:
        text = f"the trainer found no checkpoint: it trains from step 0, and {was_at} steps of this run are lost"
        state.note(f"{text}; if it has one, start the trainer with the run directory that holds it (--run-dir)", is_warning=True)


def _accept_trained(state: State, step: int, shared: int) -> None:
    """Shared steps that the trainer has behind it and the broker not yet committed are trained; of some it may have no record."""
    num_known = batches.accept_trained(state, shared, "trained, says the resumed trainer")
    num_unknown = step - min(state.meta.next_step, shared) - num_known
    num_groups = num_unknown * state.rules.batch_size
    if num_unknown > 0 and not state.meta.lineages and state.meta.cursor == 0:
        prompts.skip(state, num_groups)
        text = f"this broker has no record of the {num_unknown} steps trained so far; skipping the first {num_groups} prompts of the source"
        state.note(text, is_warning=True)
    elif num_unknown > 0:
        text = f"this broker has no record of {num_unknown} of the trained steps; up to {num_groups} prompts may be trained twice"
        state.note(text, is_warning=True)


def _rewind(state: State, step: int, version: int) -> None:
    batches.reopen(state, step, "", ASSIGNED, COMMITTED)
    for group in state.groups.every_ready():
        if group.newest_version > version or group.steps_behind > step:
            transitions.apply_transition(state, group, "abandoned", "made by a version of the abandoned timeline")
    settings.rewind(state, step)


def _revoke_leases(state: State) -> None:
    for group in state.groups.leased_for_training():
        if group.lease.lineage:
            transitions.apply_transition(state, group, "abandoned", "lease of the abandoned timeline")


# --- publish ---


def publish(state: State, event: Event, news: Publish) -> None:
    """A version can be pulled. Repeats are acknowledged; versions only rise, at the pace of the rules."""
    meta = state.meta
    if news.lineage != meta.lineage:
        raise SlimebusError(f"publish of lineage {news.lineage[:8]!r}; the broker is on {meta.lineage[:8]!r}, resume first", code="lineage")
    _check_publishers(news.publishers)
    if meta.base_version <= news.version < meta.version:  # a late repetition of what has been published
        state.reply(event.to, Ok())
        return
    is_first = meta.version == NO_VERSION
    first = meta.base_version if is_first else meta.version
    newest = meta.base_version if is_first else state.version_of(meta.next_step + 1)
    if not first <= news.version <= newest:
        expected = f"expected {first} to {newest} (one version every {state.rules.publish_interval} steps)"
        raise SlimebusError(f"publish of version {news.version} at step {meta.next_step}; {expected}", code="version")
    is_new = news.version != meta.version
    if not is_new and news.digest != meta.digest:
        raise SlimebusError(
            f"publish of version {news.version}: it was published with another digest; publish the next one", code="version"
        )
    meta.version, meta.publishers, meta.digest = news.version, list(news.publishers), news.digest
    if is_new:
        evaluation.start_if_due(state)
    state.notify()
    state.reply(event.to, Ok())


def _check_publishers(addresses: Sequence[str]) -> None:
    if not addresses:
        raise ProtocolError("publish: no publishers; name the address of each weight server")
    for address in addresses:
        is_server = is_address(address.partition("?")[0]) or address.startswith(DISK)
        if not is_server or len(address) > MAX_ADDRESS_CHARS or not address.isprintable():
            text = f"publish: {address[:100]!r} ({len(address)} characters) is no address of a weight server"
            raise ProtocolError(f"{text}; expected tcp://HOST:PORT, with ?key=, or {DISK}FOLDER, of at most {MAX_ADDRESS_CHARS} characters")
