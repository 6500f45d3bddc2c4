"""A program that looks at a store and ends: LMDB follows damaged pointers, which may end this process and no other.

python read_probe.py FOLDER TABLE...  exit code 0: data.mdb is as long as its map, and each record of these tables is reachable;
                                      1: stdout says what is not

Values are not read: a store of 10 GB is looked at in a fraction of a second.
"""

import sys
from pathlib import Path

import lmdb


def problem_of(folder: Path, tables: list[str]) -> str:
    """What is wrong with a store; empty when nothing is. A store without any table is new: its file is made as long as its map later."""
    try:
        with lmdb.open(str(folder), map_size=0, readonly=True, create=False, readahead=False, max_dbs=64) as env, env.begin() as txn:
            whole, size = env.info()["map_size"], (folder / "data.mdb").stat().st_size
            if txn.stat()["entries"] and size < whole:
                remedy = f"`truncate -s {whole} data.mdb` puts zeros in place of the rest and makes what is left readable"
                return f"data.mdb was cut short: it has {size} of {whole} bytes; {remedy}"
            return next((problem for table in tables if (problem := _problem_of_table(env, txn, table))), "")
    except lmdb.Error as bad:
        return str(bad)


def _problem_of_table(env: lmdb.Environment, txn: lmdb.Transaction, table: str) -> str:
    try:
        handle = env.open_db(table.encode(), txn=txn, create=False)
    except lmdb.NotFoundError:
        return ""
    previous, count, is_ordered = b"", 0, True
    for key in map(bytes, txn.cursor(db=handle).iternext(values=False)):
        previous, count, is_ordered = key, count + 1, is_ordered and previous < key
    expected = txn.stat(handle)["entries"]
    return "" if count == expected and is_ordered else f"table {table}: {count} records found of {expected}, or not in order"


if __name__ == "__main__":
    problem = problem_of(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.write(problem)
    sys.exit(1 if problem else 0)
