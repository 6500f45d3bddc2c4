"""What a worker can pass on to others: the payloads of its last pull, each once it is verified.

Nothing unverified leaves here, and each puller verifies again by the publisher's hashes: a peer is trusted with nothing.
"""

import threading
from collections.abc import Iterable

from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.weights.messages import Manifest, VersionGone
from slimebus.weights.tensors import NO_BASE, Target


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
        """Nothing more will come of this round: a request for anything else is answered as gone."""
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
