"""One rank's part of every version, served to workers: copied out of the model, then diffed and told of beside the next step."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from slimebus.bus.transport.server import Limits, connections_of
from slimebus.client.pull_keyring import PullKeyring
from slimebus.config.schema import RunConfig
from slimebus.security.exposure import advertised
from slimebus.telemetry.spans import Spans
from slimebus.weights.files.disk_chain import DiskChain
from slimebus.weights.pull.connection import with_key
from slimebus.weights.store.server import WeightServer
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import TensorLike, canonical
from trainer.publish.part_exchange import RankPartReport

IN_FLIGHT_BYTES = 1 << 29
"""Of copies to the host that are under way: what they read holds GPU memory until they have ended."""

IN_FLOAT32 = "e_score_correction_bias"
"""The router's correction bias moves in steps that bfloat16 rounds away, and chooses experts; engines hold it in float32 too."""

CopiedTensors = dict[str, TensorLike]


class HostSnapshot:
    """The weights at one moment: every tensor, copied into host memory that is used again: pinned and filled on a stream of its
    own where they are on a GPU.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._in_flight = 0

    @torch.no_grad()
    def copy_to_host(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> CopiedTensors:
        """These tensors in bfloat16, router biases in float32. Updates of weights do not change the copies; the next `copy_to_host` may."""
        before, self._buffers = self._buffers, {}
        for name, tensor in tensors:
            buffer = before.get(name)
            if buffer is None or buffer.shape != tensor.shape:
                dtype = torch.float32 if name.endswith(IN_FLOAT32) else torch.bfloat16
                buffer = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
            self._copy(tensor, buffer)
        self._wait_for_copies()
        return {name: _bits(buffer) for name, buffer in self._buffers.items()}

    def _copy(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        if not tensor.is_cuda:
            canonical(buffer.copy_(tensor))
            return
        rounded = canonical(tensor.to(buffer.dtype, copy=True).contiguous())  # on the GPU: half of the bytes cross
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stream = self._streams[tensor.device]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))  # which has just gathered this tensor, and goes on with the next
        with torch.cuda.stream(stream):
            buffer.copy_(rounded, non_blocking=True)
        rounded.record_stream(stream)
        self._in_flight += rounded.nbytes
        if self._in_flight > IN_FLIGHT_BYTES:
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        self._in_flight = 0


def _bits(host: torch.Tensor) -> TensorLike:
    return host.view(torch.int16).numpy().view("uint16") if host.dtype == torch.bfloat16 else host.numpy()


FANOUT = 2
"""Workers that pull a version from the trainer; the others pull it from workers that pass it on."""


class RankPart:
    """The weight server of a rank in one trainer timeline (`store.lineage`), or its part of the timeline's chain of files.

    report: called with (version, part) in the publishing thread when the part is complete, or has failed (`part.problem`).
    place: which publisher this is, from 0. broker: its address; a server that is bound everywhere is announced by this machine's address on
    the way there.
    """

    def __init__(
        self,
        config: RunConfig,
        store: VersionStore,
        keyring: PullKeyring | None,
        report: Callable[[int, RankPartReport], None],
        *,
        place: int = 0,
        broker: str = "",
        chain: DiskChain | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.store, self.report, self.spans = store, report, spans or Spans()
        self.chain = chain
        self.server: WeightServer | None = None
        if chain is not None:
            self.address = chain.address
        else:
            bind, limits = bind_of(config.weights.weights_bind, place), Limits(max_connections=connections_of(config.broker.max_clients))
            self.server = WeightServer(store, bind=bind, keyring=keyring, degree=FANOUT, limits=limits)
            public = keyring.pair.public if keyring else ""
            self.address = with_key(advertised(self.server.endpoint, config.weights.weights_advertise, broker), public)
        self._snapshot = HostSnapshot()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._pending: Future[None] | None = None

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Make this version, the next one, from these tensors. Returns once they are copied; the rest goes on beside training."""
        with self.spans(
            "wait for publisher"
        ) as wait:  # the version before must be out: its thread still reads what `copy_to_host` returned
            self.wait()
        with self.spans("copy", version=version) as copy:
            copied = self._snapshot.copy_to_host(tensors)
        self._pending = self._thread.submit(self._encode_and_report, version, copied, wait.seconds, copy.seconds)

    def _encode_and_report(self, version: int, copied: CopiedTensors, wait_s: float, copy_s: float) -> None:
        try:
            with self.spans("encode", version=version) as work:
                made = self.store.publish(copied, version=version)
                work.about["delta_bytes"] = made.delta_bytes
            if self.chain is not None:
                self.chain.write(self.store)
        except BaseException as problem:  # of any kind: rank 0 must not wait for a part that never comes
            self.report(version, RankPartReport(problem=f"{type(problem).__name__}: {problem}"))
            raise
        self.report(version, RankPartReport(address=self.address, made=made, wait_s=wait_s, copy_s=copy_s))

    def wait(self) -> None:
        """Until the last publish is announced. Raises what made it fail."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Stop serving. A version that is not told of yet is not waited for; `wait` does that."""
        if self.chain is not None:
            self.chain.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.server is not None:
            self.server.close()


def bind_of(bind: str, place: int) -> str:
    """Where the publisher at `place` binds: that many ports above the one given; port 0, any free one, stays."""
    address, _, port = bind.rpartition(":")
    return f"{address}:{int(port) + place}" if port.isdigit() and int(port) else bind
