"""Mean staleness in one line, to see when no simulation is needed.

After Applied Compute's model of asynchronous RL (3 July 2026): staleness = PQS + IQS, the steps that pass while a sample is made and
while it waits. Two of the six rows of their table disagree with the formula as published, and their workers are held back by a queue, ours
by the staleness bound: PQS is fitted here, and both are bounded by what may be in flight.
"""

import random
from statistics import fmean

from broker.simulate.workload import Workload

DRAWS = 2000
WHILE_MADE = 0.4
"""Of the steps that pass while a group is made, what its trained tokens see on average: later tokens are of versions taken up meanwhile.
Fitted to simulations of 64 workloads (rho < 1): within 15% of them."""


def longest_ratio(workload: Workload) -> float:
    """M_tail: E[longest of a group's samples] / E[length]."""
    rng = random.Random(0)
    longest = fmean(max(workload.length(rng) for _ in range(workload.samples)) for _ in range(DRAWS))
    return longest / workload.mean_length


def load_ratio(workload: Workload) -> float:
    """rho: samples that all workers could make in the time in which the trainer trains one."""
    per_worker = workload.groups_per_worker * workload.samples
    rollout_per_s = workload.workers * per_worker * workload.speed(per_worker) / workload.mean_length
    batch = workload.batch * workload.samples
    trained_per_s = batch / (workload.train_seconds(batch * workload.mean_length) + workload.publish_s)
    return rollout_per_s / trained_per_s


def mean_staleness(workload: Workload) -> float:
    """Versions, for a publish each step. rho >= 1: workers run ahead until the bound holds them back, so it is the bound.

    rho < 1: PQS = C M_tail / B steps pass while a sample is made, C the samples in flight, B those of a step; IQS = rho while it waits
    for its batch to fill.
    """
    rho, batch = load_ratio(workload), workload.batch * workload.samples
    if rho >= 1:
        return workload.max_staleness
    concurrent = min(workload.workers * workload.groups_per_worker * workload.samples, (workload.max_staleness + 1) * batch)
    return min(workload.max_staleness, WHILE_MADE * concurrent * longest_ratio(workload) / batch + rho)
