"""The staleness bound chosen while the run goes on: lowered when stale samples weigh too little, raised when the trainer waits."""

from statistics import fmean
from typing import Any

from broker.state import settings
from broker.state.broker_state import State
from slimebus.bus.messages import Set

WINDOW = 8
"""Steps under one bound before it is judged: batches that were chosen before a change, or gave no gradient, do not count."""
MIN_WAITING_SHARE = 0.1
"""A trainer that waits for more of its time than this could use a higher bound."""
ESS = "lag/all/ess_token"
"""The trainer's metric: effective sample size by number of tokens, of their ratios, not clipped. That of whole samples falls with their
length: an engine with logprobs that are off by 0.02 has 0.19 of samples of 4,096 tokens at lag 0, and 0.9996 of tokens."""
NAME = "autopilot"


def adjust_bound(state: State) -> None:
    """After a step: change the bound by one where the steps since the last change say so. Off without a target."""
    rules, last = state.rules, max((change.step for change in state.changes.values()), default=0)
    rows: list[dict[str, Any]] = [row["metrics"] for row in state.recent if row["step"] >= last and ESS in row["metrics"]][-WINDOW:]
    if not rules.target_ess or len(rows) < WINDOW:
        return
    sizes = [row[ESS] for row in rows]
    times = {part: sum(row.get(part, 0.0) for row in rows) for part in ("wait_s", "train_s")}
    waiting, bound = times["wait_s"] / (sum(times.values()) or 1.0), rules.max_staleness
    if fmean(sizes) < rules.target_ess and bound > rules.staleness_range[0]:
        _set_bound(state, bound - 1, f"ESS {fmean(sizes):.3f} is below {rules.target_ess:g}")
    elif fmean(sizes) >= rules.target_ess and waiting > MIN_WAITING_SHARE and bound < rules.staleness_range[1]:
        _set_bound(state, bound + 1, f"the trainer waited {waiting:.0%}, ESS {fmean(sizes):.3f}")


def _set_bound(state: State, bound: float, why: str) -> None:
    key = f"{NAME}/{state.meta.next_step}"
    settings.apply_change(state, f"{NAME} ({why})", Set(key=key, settings={"max_staleness": bound}))
