"""Which worker pulls a version from which source: a tree over the workers that pass on what they have verified."""

from collections.abc import Collection

MAX_WORKERS = 65536
MAX_TREES = 32


class Fanout:
    """The trees of one publisher for its newest versions. Not safe for several threads at once.

    The publisher serves the first `degree` workers, each serves the next `degree`, and so on: its link carries `degree` copies however
    many there are. Payloads lead from one base, so workers with different bases stand in different trees.

        publisher --> w0 --> w2, w3
                  --> w1 --> w4, w5 ...          (degree 2)
    """

    def __init__(self, degree: int = 2) -> None:
        self.degree = degree
        self._trees: dict[tuple[str, int, int], dict[str, int]] = {}

    def source(self, version: tuple[str, int], base: int, address: str, avoid: Collection[str] = ()) -> str:
        """Where the worker that serves at `address` shall pull `version` (lineage, number) from; empty: from the publisher.

        The same question gets the same answer for as long as the version is in use. avoid: sources that failed; a source above
        them is named instead. A worker that serves nobody (empty address) pulls from the last one that has a place for it.
        """
        tree = self._trees.setdefault((*version, base), {})
        if len(self._trees) > MAX_TREES:
            del self._trees[next(iter(self._trees))]
        if address and address not in tree and len(tree) < MAX_WORKERS:
            tree[address] = len(tree)
        place = tree.get(address, len(tree))
        above = list(tree)
        while (place := place // self.degree - 1) >= 0:
            if above[place] not in avoid and above[place] != address:
                return above[place]
        return ""
