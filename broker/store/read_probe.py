"""A program that reads tables of a store and ends: LMDB follows damaged pointers, which may end this process and no other.

python read_probe.py FOLDER TABLE...       exit code 0: each record of these tables is reachable; 1: stdout says what is not
"""

import sys

import lmdb


def unreachable(folder: str, tables: list[str]) -> str:
    """What is wrong with the first table that cannot be read as LMDB wrote it; empty when nothing is."""
    with lmdb.open(folder, readonly=True, create=False, max_dbs=64) as env, env.begin(buffers=True) as txn:
        for table in tables:
            try:
                handle = env.open_db(table.encode(), txn=txn, create=False)
            except lmdb.NotFoundError:
                continue
            keys = [bytes(key) for key in txn.cursor(db=handle).iternext(values=False)]
            expected = txn.stat(handle)["entries"]
            if len(keys) != expected or keys != sorted(set(keys)):
                return f"table {table}: {len(keys)} records found of {expected}, or not in order"
    return ""


if __name__ == "__main__":
    try:
        problem = unreachable(sys.argv[1], sys.argv[2:])
    except lmdb.Error as bad:
        problem = str(bad)
    sys.stdout.write(problem)
    sys.exit(1 if problem else 0)
