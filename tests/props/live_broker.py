"""`slimebus broker` for tests that are its trainers and workers: started, killed, started again at the same address, swept away."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from slimebus_command import ENVIRONMENT, ROOT

from slimebus.commands.status import ask_status
from slimebus.launch import free_port
from slimebus.transport.client import Client


class LiveBroker:
    """One of the config folder/run.yaml, with its log in folder/broker.log. Its clients and `others` end with it."""

    def __init__(self, folder: Path, *, run_dir: Path | None = None, num_prompts: int = 100, **sections: dict[str, Any]) -> None:
        """sections: fields of the config that differ, by section. The prompts are p0, p1, ..."""
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.folder, self.file, self.log = folder, folder / "run.yaml", folder / "broker.log"
        self.run_dir = run_dir or folder / "run"
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(num_prompts)))
        tree: dict[str, Any] = {"name": "live", "run_dir": str(self.run_dir), **sections}
        tree["broker"] = {"bind": self.address, "durability": "os", **sections.get("broker", {})}
        tree["data"] = sections.get("data", {"prompt_data": ["prompts.jsonl"]})
        self.file.write_text(yaml.safe_dump(tree))
        self.clients: list[Client] = []
        self.others: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self) -> None:
        """Start it, again after a kill. Clients find it whether it listens already or not."""
        self.process = self._start("-m", "slimebus", "broker", str(self.file))

    def start_beside(self, *words: str, log: Path | None = None) -> "subprocess.Popen[bytes]":
        """Another Python process that ends when the broker is closed. log: the broker's when not given."""
        self.others.append(self._start(*words, log=log))
        return self.others[-1]

    def _start(self, *words: str, log: Path | None = None) -> "subprocess.Popen[bytes]":
        with (log or self.log).open("ab") as out:
            return subprocess.Popen([sys.executable, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=ENVIRONMENT, cwd=ROOT)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(10)

    def client(self, name: str, role: str = "", **how: Any) -> Client:
        """One that has joined, when it has a role. how: arguments of Client."""
        client = Client(self.address, **{"name": name, "resend_s": 0.5, **how})
        self.clients.append(client)
        if role:
            client.join(role, timeout_s=60)
        return client

    def status(self) -> dict[str, Any]:
        """What `slimebus status` shows."""
        client = Client(self.address, name="watcher", resend_s=0.5)
        try:
            return ask_status(client, timeout_s=60)
        finally:
            client.close(goodbye=False)

    def close(self) -> None:
        for client in self.clients:
            client.close(goodbye=False)
        for process in (self.process, *self.others):
            process.kill()
            process.wait(10)

    def __enter__(self) -> "LiveBroker":
        return self

    def __exit__(self, *ending: object) -> None:
        self.close()
