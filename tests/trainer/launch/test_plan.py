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
NODE_1 = NodeOptions(nnodes=2, node_rank=1, master_addr="host0")
PER_NODE = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
PER_RANK = SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "6", "SLURM_NODEID": "1", "SLURM_LOCALID": "2"}


@pytest.mark.parametrize(
    ("node", "nproc_per_node", "environ", "expected"),
    [
        (NodeOptions(), 1, {}, {"is_alone": True, "found": "no launcher"}),
        (NodeOptions(nnodes=1), 1, {}, {"is_alone": True}),
        (NodeOptions(), 4, {}, {"is_alone": False, "ranks_here": 4, "nnodes": 1, "world_size": 4, "master_addr": "127.0.0.1"}),
        (
            NODE_1,
            4,
            {},
            {"found": "node 1 of 2, from --nnodes", "node_rank": 1, "world_size": 8, "master_addr": "host0", "master_port": 29500},
        ),
        (NodeOptions(), 4, TORCHRUN, {"is_rank": True, "found": "rank 3 of 8, from torchrun", "world_size": 8}),
        # a rank of our launcher ignores the options that its launcher was given
        (NODE_1, 4, TORCHRUN | {"SLIMEBUS_LAUNCHED": "1"}, {"found": "rank 3 of 8, from its launcher"}),
        (NodeOptions(), 4, PER_NODE, {"is_rank": False, "found": "node 1 of 2, from Slurm's job 1234567", "ranks_here": 4, "nnodes": 2}),
        (NodeOptions(), 4, PER_NODE, {"node_rank": 1, "master_addr": "gpu03", "master_port": 24567}),
        # the address and port of the environment go before Slurm's
        (NodeOptions(), 4, PER_NODE | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "7"}, {"master_addr": "10.1.1.1", "master_port": 7}),
    ],
)
def test_options_and_environment_say_which_ranks_there_are(node: NodeOptions, nproc_per_node: int, environ: dict, expected: dict) -> None:
    plan = make_plan(node, nproc_per_node, environ)
    assert {name: getattr(plan, name) for name in expected} == expected


def test_a_rank_of_torchrun_is_a_rank_also_where_its_number_is_not_said() -> None:
    assert make_plan(NodeOptions(), 1, TORCHRUN, is_nproc_given=False).is_rank


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
