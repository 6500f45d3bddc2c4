"""The bus, written from docs/protocol.md alone: pyzmq and msgpack, nothing of slimebus; and samples that are known by their group."""

import secrets
import struct
import sys
import time
from typing import Any

import msgpack
import zmq

RETRY_S = 0.5
PATIENCE_S = 2.0


class Refused(Exception):
    """An `error` that another try does not mend."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Bus:
    """One process on the bus. `ask` sends a request until it is answered; `beat` keeps the process and its leases alive."""

    def __init__(self, address: str, name: str, role: str) -> None:
        self.name, self.role = name, role
        self.instance = secrets.token_hex(8)
        self.run, self.epoch, self.v = "", 0, 1
        self.next_id = 1
        self.leases: set[int] = set()
        self.lost: set[int] = set()
        self.is_finished = False
        self.repeats = 0
        self.context = zmq.Context()
        self.socket: Any = self.context.socket(zmq.DEALER)
        self.socket.identity = f"{name}/{self.instance}".encode()
        self.socket.linger = 0
        self.socket.connect(address)
        self.heartbeat_s = 1.0
        self.last_beat = 0.0
        self.join()

    def join(self) -> None:
        """hello, welcome."""
        hello = {"role": self.role, "instance": self.instance, "protocol": 1, "oldest": 1}
        _, welcome, _ = self.ask("hello", hello)
        self.run, self.epoch, self.heartbeat_s = welcome["run"], welcome["epoch"], welcome["heartbeat_s"]
        self.v = welcome.get("protocol", 1)

    def ask(self, kind: str, body: dict[str, Any], bulk: list[bytes] | None = None) -> tuple[str, dict[str, Any], list[bytes]]:
        """The reply's type, body and bulk frames. The same id is sent again until there is an answer. Raises Refused."""
        number, self.next_id = self.next_id, self.next_id + 1
        while True:
            self.socket.send_multipart([self.header(kind, number, body), *(bulk or [])])
            reply = self.await_reply(number, PATIENCE_S + body.get("wait_s", 0.0))
            if reply is None:
                self.repeats += 1
                continue
            what, told, _ = reply
            if what != "error":
                return reply
            if told.get("retryable", False):
                self.repeats += 1
                time.sleep(RETRY_S)
            elif told["code"] == "not_joined" and kind != "hello":
                self.join()
            else:
                raise Refused(told["code"], told["text"])

    def header(self, kind: str, number: int, body: dict[str, Any]) -> bytes:
        fields = {"type": kind, "id": number, "body": body, "v": self.v, "run": self.run, "sender": self.name, "epoch": self.epoch}
        return bytes(msgpack.packb(fields))

    def await_reply(self, number: int, patience_s: float) -> tuple[str, dict[str, Any], list[bytes]] | None:
        """The reply to a request; late replies to other requests are ignored. None when patience ran out."""
        deadline = time.monotonic() + patience_s
        while (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(round(1000 * left)):
                frames = self.socket.recv_multipart()
                header = msgpack.unpackb(frames[0])
                if header["id"] == number:
                    return header["type"], header["body"], frames[1:]
        return None

    def beat(self) -> None:
        """A heartbeat when one is due."""
        if time.monotonic() - self.last_beat < self.heartbeat_s:
            return
        self.last_beat = time.monotonic()
        counted = {"num_leases": len(self.leases), "lease_sum": sum(self.leases) % (1 << 63)}
        _, told, _ = self.ask("heartbeat", {"state": "serving", **counted})
        if told.get("list_leases"):
            _, told, _ = self.ask("heartbeat", {"state": "serving", **counted, "leases": sorted(self.leases)})
        self.lost |= set(told.get("lost", [])) | set(told.get("surplus", []))
        self.leases -= self.lost
        self.is_finished = told.get("finished", False)

    def leave(self) -> None:
        """goodbye."""
        self.ask("goodbye", {})
        self.socket.close()
        self.context.term()
        assert not [name for name in sys.modules if name.split(".")[0] in ("slimebus", "broker", "rollout", "trainer")]


def sample(group: str, index: int) -> dict[str, bytes | int]:
    """Token arrays of sample `index` of a group `0/ROW` as raw little-endian bytes, and T, their length.

    They follow from the name of their group, so whoever reads them knows what each byte must be.
    """
    row = int(group.split("/")[1])
    length = 3 + (row + index) % 5
    return {
        "T": length,
        "tokens": struct.pack(f"<{length}i", *(row * 1000 + index * 10 + t for t in range(length))),
        "loss_mask": bytes([0, *[1] * (length - 1)]),
        "rollout_logprobs": struct.pack(f"<{length}f", *(-0.25 * t for t in range(length))),
        "pages": struct.pack("<4h", row % 100, index, -1, 7),
    }
