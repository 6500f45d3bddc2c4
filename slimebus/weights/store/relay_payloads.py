"""Who pulls a version from whom, and what a worker can pass on to others: the payloads of its last pull, each once it is verified.

Nothing unverified leaves here, and whoever pulls verifies again by the publisher's hashes: a peer is trusted with nothing.
"""

import threading
from collections.abc import Collection, Iterable

from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.weights.messages import Manifest, VersionGone
from slimebus.weights.pull.plan import Target
from slimebus.weights.tensors import NO_BASE

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

        The same question gets the same answer for as long as the version is in use. avoid: sources that did not do; whoever stands above
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


class NotYet(WeightsError):
    """This payload is on its way here, or may be soon. is_pulling: False where its version has not been asked for yet."""

    code = "not_yet"

    def __init__(self, text: str, *, is_pulling: bool) -> None:
        super().__init__(text)
        self.is_pulling = is_pulling


class RelayPayloads:
    """Filled by one puller, read by the server beside it. Holds the payloads of one version: deltas, and full tensors by reference."""

    def __init__(self) -> None:
        self._target = Target("", NO_BASE)
        self._payloads: dict[tuple[str, int], memoryview] = {}
        self._expected: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def begin(self, target: Target, expected: Iterable[tuple[str, int]]) -> None:
        """A round pulls these payloads, (tensor, base), of this version; those of an older version are let go."""
        with self._lock:
            if target != self._target:
                self._target, self._payloads = target, {}
            self._expected = set(expected) - self._payloads.keys()

    def add(self, name: str, base: int, payload: memoryview) -> None:
        """A payload of the version is verified."""
        with self._lock:
            self._payloads[name, base] = payload
            self._expected.discard((name, base))

    def end(self) -> None:
        """Nothing more will come of this round: who waits for something else is told that it is gone."""
        with self._lock:
            self._expected.clear()

    def manifest(self, have_lineage: str, have_version: int, want: int) -> Manifest:
        """Manifests, and with them hashes, come from the publisher only."""
        raise FatalWeightsError("a worker passes payloads on; ask the publisher for the manifest", code="no_manifest")

    def read(self, lineage: str, version: int, name: str, base: int) -> memoryview:
        """A verified payload. Raises NotYet for one that may come, VersionGone for others."""
        with self._lock:
            if (lineage, version) == self._target:
                found = self._payloads.get((name, base))
                if found is not None:
                    return found
                if (name, base) in self._expected:
                    raise NotYet(f"tensor {name!r} of version {version} is on its way here", is_pulling=True)
            elif lineage != self._target.lineage or version > self._target.version:
                raise NotYet(f"version {version} is not pulled here yet", is_pulling=False)
        raise VersionGone(f"{name!r} of version {version} from base {base} is not passed on here")
