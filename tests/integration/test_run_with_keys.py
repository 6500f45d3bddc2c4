"""A whole small run with keys on an address that other machines could reach, and processes that do not belong to it."""

import json
from pathlib import Path

import psutil
import pytest
from live_run import Run, clients
from slimebus_command import slimebus

from slimebus.process.launch import free_port
from slimebus.security import key_folder

pytestmark = pytest.mark.integration


def own_address() -> str:
    """An address of this machine that is not loopback, or skip."""
    found = [a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family.name == "AF_INET"]
    outer = [address for address in found if not address.startswith("127.")]
    if not outer:
        pytest.skip("this machine has no address beyond loopback")
    return outer[0]


def test_a_run_over_the_network_with_keys_finishes_and_strangers_stay_outside(tmp_path: Path, task: Path) -> None:
    """The trainer's and the worker's machines have one file each; a key of another folder, no key and a viewer's key get nothing."""
    folder, host, port = tmp_path / "keys", own_address(), free_port()
    key_folder.init(folder)
    key_folder.add(folder, "viewer", "viewer")
    key_folder.init(tmp_path / "strange")
    for name in ("trainer", "rollout"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.key").write_bytes((folder / f"{name}.key").read_bytes())
        (tmp_path / name / f"{name}.key").chmod(0o600)
    ours = {"SLIMEBUS_SECURITY_KEYS": str(folder)}
    with Run(tmp_path / "run", task, weights__weights_bind=f"tcp://{host}:0", rollout__num_rollout=4) as run:
        run.address = f"tcp://{host}:{port}"
        run.keys = folder
        run.start("broker", "--bind", f"tcp://0.0.0.0:{port}", "--keys", str(folder))
        run.start("trainer", "--broker", run.address, "--keys", str(tmp_path / "trainer"))
        run.wait_for("the trainer", lambda s: s["lineage"])
        address = ["--broker", run.address, "--timeout-s", "3"]
        plain = slimebus("status", *address)
        strange = slimebus("status", *address, SLIMEBUS_SECURITY_KEYS=str(tmp_path / "strange"))
        assert "takes nobody without a key" in plain.stderr
        assert "has another key than" in strange.stderr
        assert plain.returncode != 0
        assert strange.returncode != 0
        assert json.loads(slimebus("status", "--json", *address, "--keys", f"{folder}/viewer.key", **ours).stdout)["run"] == "tiny"
        refused = slimebus("set", "max-staleness", "3", *address, "--keys", f"{folder}/viewer.key", **ours)
        assert "key 'viewer' has the role viewer, which may not send 'set'" in refused.stderr
        assert "max_staleness: 1 -> 3" in slimebus("set", "max-staleness", "3", *address, **ours).stdout
        run.start("rollout", "--broker", run.address, "--keys", str(tmp_path / "rollout"), "--worker-name", "w1")
        status = run.wait_for("weights over the trainer's own socket", lambda s: any(c["version"] >= 0 for c in clients(s, "rollout")))
        assert status["security"]["transport"] == "curve"
        run.complete(4)


def test_a_revoked_worker_leaves_within_seconds_and_its_groups_go_to_another(tmp_path: Path, task: Path) -> None:
    folder = tmp_path / "keys"
    key_folder.init(folder)
    key_folder.add(folder, "node2", "rollout")
    with Run(tmp_path / "run", task, slow_s=1.0, security__keys=str(folder), rollout__num_rollout=8) as run:
        run.keys = folder
        run.start("broker")
        run.start("trainer")
        run.start("rollout", "--keys", str(folder / "rollout.key"), "--worker-name", "w1")
        revoked = run.start("rollout", "--keys", str(folder / "node2.key"), "--worker-name", "w2")
        run.wait_for("both workers", lambda s: len(clients(s, "rollout")) == 2)
        key_folder.revoke(folder, "node2")
        revoked.ends(1, 60)
        assert "revoked" in revoked.text()
        run.wait_for("it to be out", lambda s: [c["name"] for c in clients(s, "rollout")] == ["w1"], 20)
        run.complete(8)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://some-host:0"])
def test_the_broker_and_the_trainer_refuse_to_listen_beyond_this_machine_without_keys(tmp_path: Path, task: Path, address: str) -> None:
    with Run(tmp_path / "run", task) as run:
        broker = slimebus("broker", str(run.file), "--bind", address)
        trainer = slimebus("trainer", str(run.file), "--weights-bind", address) if address == "tcp://0.0.0.0:0" else broker
        for refused, field in ((broker, "broker.bind"), (trainer, "weights.weights_bind" if trainer is not broker else "broker.bind")):
            assert refused.returncode == 2
            assert f"{field} {address} can be reached from other machines, and there are no keys" in refused.stderr
            assert "slimebus keys init" in refused.stderr
            assert "--insecure" in refused.stderr


def test_insecure_listens_anywhere_and_says_so_in_log_and_status(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path / "run", task) as run:
        broker = run.start("broker", "--bind", run.address.replace("127.0.0.1", "0.0.0.0"), "--insecure")
        status = run.wait_for("the broker", lambda s: s)
        assert "INSECURE" in broker.text()
        assert status["security"]["problem"].startswith("INSECURE: tcp://0.0.0.0:")
