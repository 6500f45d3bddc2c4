"""Which ranks this command starts, or is: decided from its options and the environment that a launcher has set."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slimebus.bus.errors import UsageError

LAUNCHED = "SLIMEBUS_LAUNCHED"
"""In the environment of ranks that a launcher of ours has started: the file descriptor where a rank writes its error."""
PORT = 29500
"""Where the first node listens for the others, as torchrun does."""
SLURM_PORTS = (20000, 10000)
"""Slurm jobs meet at a port of their own: the first of the range, and its length."""
HOST_LIST = re.compile(r"([^,\[]+)(?:\[([^\]]*)\])?")


@dataclass(frozen=True)
class NodeOptions:
    """What the options say. None: not given."""

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def is_given(self) -> bool:
        """Whether any option is."""
        return any(value is not None for value in (self.nnodes, self.node_rank, self.master_addr, self.master_port))


@dataclass(frozen=True)
class LaunchPlan:
    """found: what decided, for the log. is_rank: this process is a rank, with `environment` (RANK, WORLD_SIZE, ...) to be set; else it
    starts `ranks_here` ranks as node `node_rank` of `nnodes`, which meet at master_addr:master_port.
    """

    found: str
    ranks_here: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    is_rank: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return int(self.environment["WORLD_SIZE"]) if self.is_rank else self.ranks_here * self.nnodes

    @property
    def is_alone(self) -> bool:
        """Whether this process is the only rank, so that nothing is started."""
        return not self.is_rank and self.world_size == 1


def make_plan(node: NodeOptions, nproc_per_node: int, environ: Mapping[str, str], *, is_nproc_given: bool = True) -> LaunchPlan:
    """The plan of this process. is_nproc_given: whether the config says how many ranks a node has, or that is its default.

    Raises UsageError where options and environment contradict each other, or say too little.
    """
    if "RANK" in environ:
        return _plan_of_rank(node, nproc_per_node if is_nproc_given else None, environ)
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and _slurm(environ, "STEP_NUM_TASKS", "NTASKS") > 1:
        return _plan_of_slurm(node, nproc_per_node, environ)
    if not node.is_given:
        return LaunchPlan("no launcher", ranks_here=nproc_per_node)
    return _plan_of_options(node, nproc_per_node)


def _plan_of_rank(node: NodeOptions, nproc_per_node: int | None, environ: Mapping[str, str]) -> LaunchPlan:
    """Started by torchrun, or by another that sets its variables."""
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in wanted if name not in environ]
    if missing and environ.get("WORLD_SIZE") != "1":
        remedy = "a launcher such as torchrun sets them all, unset RANK"
        raise UsageError(f"RANK is set in the environment, but not {', '.join(missing)}; {remedy}")
    if node.is_given and LAUNCHED not in environ:
        raise UsageError("RANK is set in the environment, so this process is one rank of a launcher; leave --nnodes and its like to that")
    here = environ.get("LOCAL_WORLD_SIZE")
    if here is not None and nproc_per_node is not None and int(here) != nproc_per_node:
        raise UsageError(f"trainer.nproc_per_node is {nproc_per_node}, but the launcher has started {here} ranks here; make them equal")
    given = {name: environ[name] for name in wanted if name in environ}
    by = "its launcher" if LAUNCHED in environ else "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment"
    return LaunchPlan(f"rank {given['RANK']} of {given['WORLD_SIZE']}, from {by}", is_rank=True, environment=given)


def _plan_of_slurm(node: NodeOptions, nproc_per_node: int, environ: Mapping[str, str]) -> LaunchPlan:
    """Started by srun: one task a node, which starts the node's ranks, or one task a rank."""
    tasks, nodes = _slurm(environ, "STEP_NUM_TASKS", "NTASKS"), _slurm(environ, "STEP_NUM_NODES", "NNODES", "JOB_NUM_NODES")
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not hosts:
        raise UsageError("SLURM_PROCID is set but no SLURM_JOB_NODELIST; start the trainer with srun, or give --nnodes and its like")
    address = environ.get("MASTER_ADDR") or first_host(hosts)
    first, length = SLURM_PORTS
    port = int(environ.get("MASTER_PORT") or first + int(environ.get("SLURM_JOB_ID", "0")) % length)
    _must_agree(node, {"nnodes": nodes, "node_rank": _slurm(environ, "NODEID"), "master_addr": address, "master_port": port})
    job = f"Slurm's job {environ.get('SLURM_JOB_ID', '?')}"
    if tasks == nodes:
        rank = _slurm(environ, "NODEID")
        return LaunchPlan(f"node {rank} of {nodes}, from {job}", nproc_per_node, nodes, rank, address, port)
    if tasks != nodes * nproc_per_node and nproc_per_node > 1:
        raise UsageError(
            f"{job} has {tasks} tasks on {nodes} nodes, but trainer.nproc_per_node is {nproc_per_node}; "
            f"start one task a node (srun --ntasks-per-node 1), or {nproc_per_node}"
        )
    rank = _slurm(environ, "PROCID")
    given = {"RANK": str(rank), "WORLD_SIZE": str(tasks), "LOCAL_RANK": environ.get("SLURM_LOCALID", "0")}
    given |= {"GROUP_RANK": environ.get("SLURM_NODEID", "0"), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return LaunchPlan(f"rank {rank} of {tasks}, from {job}", is_rank=True, environment=given)


def _plan_of_options(node: NodeOptions, nproc_per_node: int) -> LaunchPlan:
    if node.nnodes is None:
        raise UsageError("--node-rank, --master-addr and --master-port are of several nodes; give --nnodes too")
    rank = 0 if node.nnodes == 1 and node.node_rank is None else node.node_rank
    if rank is None or (node.nnodes > 1 and node.master_addr is None):
        raise UsageError(f"--nnodes {node.nnodes} needs --node-rank, this node's number, and --master-addr, the host name of node 0")
    if not 0 <= rank < node.nnodes:
        raise UsageError(f"--node-rank {rank}: {node.nnodes} nodes have the numbers 0 to {node.nnodes - 1}")
    address = node.master_addr or "127.0.0.1"
    return LaunchPlan(f"node {rank} of {node.nnodes}, from --nnodes", nproc_per_node, node.nnodes, rank, address, node.master_port or PORT)


def _must_agree(node: NodeOptions, found: Mapping[str, object]) -> None:
    for name, value in found.items():
        given = getattr(node, name)
        if given is not None and given != value:
            option = f"--{name.replace('_', '-')} {given}"
            raise UsageError(f"{option} contradicts Slurm, which says {value}; leave it out, or start without srun")


def _slurm(environ: Mapping[str, str], *names: str) -> int:
    """The first of these SLURM_ variables that is set."""
    for name in names:
        if value := environ.get(f"SLURM_{name}"):
            return int(value)
    raise UsageError(f"SLURM_PROCID is set but not SLURM_{names[0]}; start the trainer with srun, or give --nnodes and its like")


def first_host(host_list: str) -> str:
    """The first host of Slurm's compressed list: `gpu[03-05,9],x` gives gpu03."""
    match = HOST_LIST.match(host_list.strip())
    if match is None:
        raise UsageError(f"SLURM_JOB_NODELIST {host_list!r} names no host")
    name, numbers = match.groups()
    return name + (re.split(r"[-,]", numbers)[0] if numbers else "")
