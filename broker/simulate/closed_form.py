"""Mean staleness in one line, to see when no simulation is needed.

After Applied Compute's model of asynchronous RL (3 July 2026): staleness = PQS + IQS, the steps that pass while a sample is made and
while it waits. Two of the six rows of their table disagree with the formula as published, and their workers are held back by a queue, ours
by the staleness bound. Our workers hold groups until their longest sample is done, so PQS needs no ratio of lengths.
"""

from broker.simulate.workload import Workload


def evaluated_share(workload: Workload) -> float:
    """Of the samples that workers make, those of evaluations."""
    evaluated = workload.eval_samples / workload.eval_interval / workload.publish_interval if workload.eval_interval else 0.0
    return evaluated / (evaluated + workload.batch * workload.samples)


def made_per_s(workload: Workload) -> float:
    """Batches that all workers could make a second beside the evaluations."""
    per_worker = workload.groups_per_worker * workload.samples
    samples = workload.workers * per_worker * workload.speed(per_worker) / workload.mean_length
    return samples * (1 - evaluated_share(workload)) / (workload.batch * workload.samples)


def load_ratio(workload: Workload) -> float:
    """rho: batches that all workers could make in the time in which the trainer trains one."""
    batch = workload.batch * workload.samples
    return made_per_s(workload) * (workload.train_seconds(batch * workload.mean_length) + workload.publish_s)


def mean_staleness(workload: Workload) -> float:
    """Versions, of a sample's oldest token, for a publish each step. rho >= 1: workers run ahead until the bound holds them back.

    rho < 1: PQS = G / B steps pass while a group is made, G those in flight, B those of a step (Little's law); IQS = rho while it waits for
    its batch to fill, and as long as a version takes to workers.
    """
    rho = load_ratio(workload)
    if rho >= 1:
        return workload.max_staleness
    in_flight = min(workload.workers * workload.groups_per_worker, (workload.max_staleness + 1) * workload.batch)
    made = in_flight * (1 - evaluated_share(workload)) / workload.batch
    return min(workload.max_staleness, made + rho + workload.pull_s * made_per_s(workload))
