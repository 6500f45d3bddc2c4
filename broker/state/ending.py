"""How a run ends: its trainer has finished, the last evaluations are made, then every process has to leave.

An evaluation that nobody can make holds the end for `client_timeout_s` and is then ended with what it has: when no worker takes part, or
when none that does serves its version and no trainer is there to pull it from. A restarted broker gives it that time anew.
"""

import math

from broker.state import admission, evaluation
from broker.state.broker_state import State
from broker.state.clients import clients_awaited_at_end, is_present
from broker.state.effects import Event
from broker.state.records import ClientRecord, Evaluation
from slimebus.bus.messages import Finish, Ok

UNSERVED = "no worker serves its version"
"""The reason under which its prompts are counted."""


def finish(state: State, event: Event, request: Finish) -> None:
    """The last step is trained; workers leave once the last evaluation is done."""
    state.confirm_finish()
    if not state.meta.finishing:
        state.meta.finishing, state.meta.finished_num_steps = True, state.rules.num_steps or 0
        evaluation.start_automatic(state)
        state.note(f"the trainer has finished{': ' + request.reason if request.reason else ''}")
    state.reply(event.to, Ok())


def reopen(state: State) -> None:
    """A trainer begins or goes on."""
    state.meta.finishing = state.finish_is_announced = False


def announce(state: State) -> bool:
    """True once, when the run is finished: everyone hears it."""
    is_new = state.is_finished and not state.finish_is_announced
    state.finish_is_announced |= is_new
    return is_new


def await_confirmation(state: State) -> None:
    """After a restart: a finished run may be given a trainer that goes on."""
    if state.meta.finishing:
        state.confirm_finish(is_certain=False)
        state.timers.set(("finish", None), state.now + state.rules.client_timeout_s)


def is_over(state: State) -> bool:
    """True once the run is finished, and every process that its broker waits for has left."""
    return state.is_finished and not clients_awaited_at_end(state)


def confirm_finish(state: State) -> None:
    """After a restart of the broker nobody from before has spoken for a while: they are gone, and no trainer has come to go on."""
    before = state.members_at_restart
    if not state.meta.finishing or state.finish_is_confirmed or not state.had_members:
        return
    if any(c.role == "trainer" and is_present(c) and (c.name, c.instance) not in before for c in state.clients.values()):
        state.timers.set(("finish", None), state.now + state.rules.client_timeout_s)
    else:
        state.confirm_finish()


def watch_evaluations(state: State) -> None:
    """Set a deadline for each running evaluation that nobody can make, and cancel it when somebody can again."""
    if not state.meta.finishing:
        return
    for running in evaluation.running_evaluations(state):
        timer = ("unserved evaluation", running.key)
        if not why_unserved(state, running):
            state.timers.cancel(timer)
        elif state.timers.deadline(timer) == math.inf:
            state.timers.set(timer, state.now + state.rules.client_timeout_s)


def end_unserved(state: State, key: str) -> None:
    """Nobody came who can make this evaluation."""
    if why := why_unserved(state, state.evaluations[key]):
        evaluation.end_evaluation(state, state.evaluations[key], UNSERVED, why)


def why_unserved(state: State, running: Evaluation) -> str:
    """Why nobody who takes part can make an evaluation, now or after a pull; empty when somebody can."""
    present = [client for client in state.clients.values() if is_present(client)]
    workers = [client for client in present if client.role == "rollout"]
    if not workers:
        return "no worker is left to evaluate"
    if any(client.role == "trainer" for client in present) or any(can_serve_evaluation(state, client, running) for client in workers):
        return ""
    return f"no connected worker serves version {running.version} and the trainer that could serve it has left"


def can_serve_evaluation(state: State, worker: ClientRecord, running: Evaluation) -> bool:
    """True for a worker that may lease prompts of this evaluation."""
    return worker.serving >= running.version and not admission.unready_weights(state, worker)
