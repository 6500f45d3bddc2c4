"""Which ranks a command starts, or is: from options and environment alone."""

import pytest

from slimebus.bus.errors import UsageError
from trainer.launch.plan import NodeOptions, first_host, make_plan

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN |= {"TORCHELASTIC_RUN_ID": "none"}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
PER_NODE = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
PER_RANK = SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "6", "SLURM_NODEID": "1", "SLURM_LOCALID": "2"}


def test_one_rank_is_alone() -> None:
    plan = make_plan(NodeOptions(), 1, {})
    assert plan.is_alone
    assert plan.found == "no launcher"


def test_several_ranks_of_one_node() -> None:
    plan = make_plan(NodeOptions(), 4, {})
    assert not plan.is_alone
    assert (plan.ranks_here, plan.nnodes, plan.world_size, plan.master_addr) == (4, 1, 4, "127.0.0.1")


def test_options_say_which_node_this_is() -> None:
    plan = make_plan(NodeOptions(nnodes=2, node_rank=1, master_addr="host0"), 4, {})
    assert (plan.node_rank, plan.world_size, plan.master_addr, plan.master_port) == (1, 8, "host0", 29500)
    assert plan.found == "node 1 of 2, from --nnodes"
    assert make_plan(NodeOptions(nnodes=1), 1, {}).is_alone


def test_a_rank_of_torchrun_is_a_rank() -> None:
    plan = make_plan(NodeOptions(), 4, TORCHRUN)
    assert plan.is_rank
    assert plan.found == "rank 3 of 8, from torchrun"
    assert plan.world_size == 8
    assert make_plan(NodeOptions(), 1, TORCHRUN, is_nproc_given=False).is_rank


def test_a_rank_of_our_launcher_ignores_the_options_that_its_launcher_was_given() -> None:
    environ = {**TORCHRUN, "SLIMEBUS_LAUNCHED": "1"}
    assert make_plan(NodeOptions(nnodes=2, node_rank=0, master_addr="a"), 4, environ).found == "rank 3 of 8, from its launcher"


def test_slurm_with_one_task_a_node_starts_the_nodes_ranks() -> None:
    plan = make_plan(NodeOptions(), 4, PER_NODE)
    assert not plan.is_rank
    assert (plan.ranks_here, plan.nnodes, plan.node_rank, plan.master_addr, plan.master_port) == (4, 2, 1, "gpu03", 24567)
    assert plan.found == "node 1 of 2, from Slurm's job 1234567"


@pytest.mark.parametrize("nproc_per_node", [1, 4])
def test_slurm_with_one_task_a_rank_is_a_rank(nproc_per_node: int) -> None:
    plan = make_plan(NodeOptions(), nproc_per_node, PER_RANK)
    assert plan.is_rank
    assert plan.environment == {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "24567",
    }


def test_the_address_and_port_of_the_environment_go_before_slurms() -> None:
    plan = make_plan(NodeOptions(), 4, PER_NODE | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "7"})
    assert (plan.master_addr, plan.master_port) == ("10.1.1.1", 7)


def test_a_batch_script_or_a_single_task_of_slurm_is_no_launcher() -> None:
    script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b"}
    assert make_plan(NodeOptions(), 4, script).found == "no launcher"
    one = PER_NODE | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert make_plan(NodeOptions(nnodes=2, node_rank=1, master_addr="a"), 4, one).node_rank == 1


@pytest.mark.parametrize(
    ("node", "nproc_per_node", "environ", "text"),
    [
        (NodeOptions(node_rank=1), 1, {}, "give --nnodes too"),
        (NodeOptions(nnodes=2), 1, {}, "--nnodes 2 needs --node-rank"),
        (NodeOptions(nnodes=2, node_rank=1), 1, {}, "and --master-addr, the host name of node 0"),
        (NodeOptions(nnodes=2, node_rank=2, master_addr="a"), 1, {}, "--node-rank 2: 2 nodes have the numbers 0 to 1"),
        (NodeOptions(nnodes=2, node_rank=0, master_addr="a"), 4, TORCHRUN, "one rank of a launcher; leave --nnodes"),
        (NodeOptions(), 2, TORCHRUN, "trainer.nproc_per_node is 2, but the launcher has started 4 ranks here; make them equal"),
        (NodeOptions(), 4, {"RANK": "1", "WORLD_SIZE": "2"}, "RANK is set in the environment, but not MASTER_ADDR, MASTER_PORT"),
        (NodeOptions(nnodes=3), 4, PER_NODE, "--nnodes 3 contradicts Slurm, which says 2"),
        (NodeOptions(node_rank=0), 4, PER_NODE, "--node-rank 0 contradicts Slurm, which says 1"),
        (NodeOptions(), 3, PER_RANK, "has 8 tasks on 2 nodes, but trainer.nproc_per_node is 3"),
        (NodeOptions(), 4, {name: value for name, value in PER_NODE.items() if "NODELIST" not in name}, "no SLURM_JOB_NODELIST"),
    ],
)
def test_contradictions_are_refused(node: NodeOptions, nproc_per_node: int, environ: dict, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(")):
        make_plan(node, nproc_per_node, environ)


@pytest.mark.parametrize(
    ("host_list", "host"),
    [
        ("gpu[03-05,9],x", "gpu03"),
        ("a", "a"),
        ("a,b", "a"),
        ("node[7]", "node7"),
        ("r1-n[001,004-008]", "r1-n001"),
        ("r1-n2,r1-n3", "r1-n2"),
    ],
)
def test_the_first_host_of_slurms_list(host_list: str, host: str) -> None:
    assert first_host(host_list) == host
