"""What the broker is measured against in `bin/bench broker`: a ROUTER without a broker behind it, LMDB without a socket.

bench_bare.py echo|acknowledge                prints its address and serves until it is killed
bench_bare.py lmdb DIR GROUPS BURST grow|reuse  appends that many groups, BURST a transaction; prints {"groups", "seconds"}
"""

import json
import sys
import time
from pathlib import Path

import lmdb
import zmq
from bench_load import FRAMES

HEADER_BYTES = 900
"""What a put's header takes beside its frames."""


def serve(kind: str) -> None:
    """Answer every message with itself, or with one short frame."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 100_000
    socket.bind("tcp://127.0.0.1:*")
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    while True:
        frames = socket.recv_multipart()
        socket.send_multipart(frames if kind == "echo" else [frames[0], b"ok"])


def append(path: Path, groups: int, burst: int, pages: str) -> dict[str, float]:
    """Values of a group's size under rising keys, one synced commit a burst. pages: `reuse` removes them again for the next call."""
    env = lmdb.open(str(path), map_size=1 << 35, max_dbs=2)
    table = env.open_db(b"payloads")
    value = b"".join((b"h" * HEADER_BYTES, *FRAMES))
    with env.begin(db=table) as txn, txn.cursor() as cursor:
        next_key = int(cursor.key()) + 1 if cursor.last() else 0
    started = time.perf_counter()
    for first in range(next_key, next_key + groups, burst):
        with env.begin(write=True, db=table) as txn:
            for i in range(first, min(next_key + groups, first + burst)):
                txn.put(b"%012d" % i, value, append=True)
    seconds = time.perf_counter() - started
    if pages == "reuse":
        with env.begin(write=True, db=table) as txn:
            txn.drop(table, delete=False)
    env.close()
    return {"groups": groups, "seconds": seconds}


def main() -> None:
    """See the head of this file."""
    if sys.argv[1] == "lmdb":
        print(json.dumps(append(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])))
    else:
        serve(sys.argv[1])


if __name__ == "__main__":
    main()
