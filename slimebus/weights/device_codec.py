"""The codec on torch tensors where they lie, such as in a GPU's memory: the same payloads as slimebus.weights.codec.

    scan    the device finds what changed and makes the streams; they alone cross to the host, in one copy for every 2**26 values
    encode  scan, then compression on the host
    apply   the host checks every stream of the payload, then the device decodes them and adds the steps

Plain torch operations, so any device will do. Bit patterns are int16 here: torch can hardly calculate with uint16.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slimebus.errors import WeightsError
from slimebus.weights import codec, kernel_numpy
from slimebus.weights.codec import UNIT_VALUES, Encoded
from slimebus.weights.kernel import Bytes, Changes, load_kernel
from slimebus.weights.kernel_numpy import ESCAPE, SKIP, WIDE

if TYPE_CHECKING:
    import torch

AT_ONCE = 4 * UNIT_VALUES
"""Values scanned together: each takes a byte of the device's memory meanwhile, and each changed one 80."""

_NOTHING = Changes(*(np.empty(0, np.uint8) for _ in range(4)))


def encode(base: "torch.Tensor", target: "torch.Tensor", *, update: bool = False, zstd: bool = True) -> Encoded:
    """The delta from base to target, bfloat16 or float16 on one device; with update, base becomes target.

    The bytes that `codec.encode` makes of the same values. Raises WeightsError where dtype, shape or device differ.
    """
    bits = _bits(target)

    def encode_from(start: int, changes: Changes) -> Encoded:
        new = bits[start : start + UNIT_VALUES]
        return codec.encode_unit(changes, len(new), lambda: new.cpu().numpy().view(np.uint16), zstd, load_kernel())

    units = scan(base, target, update=update)
    return codec.join([encode_from(start, changes) for start, changes in zip(range(0, len(bits), UNIT_VALUES), units, strict=True)])


def scan(base: "torch.Tensor", target: "torch.Tensor", *, update: bool = False) -> list[Changes]:
    """What changed, for each unit, on the host; with update, base becomes target. For `codec.encode_changes`.

    Waits for the device. Raises WeightsError where dtype, shape or device differ.
    """
    if (base.dtype, base.shape, base.device) != (target.dtype, target.shape, target.device):
        told = [f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}" for tensor in (base, target)]
        raise WeightsError(f"delta between {told[0]} and {told[1]}; expected two tensors alike", retryable=False)
    old, new = _bits(base), _bits(target)
    return [
        changes
        for start in range(0, len(old), AT_ONCE)
        for changes in _scan_units(old[start : start + AT_ONCE], new[start : start + AT_ONCE], update)
    ]


def apply(payload: Any, tensor: "torch.Tensor") -> None:
    """Turn the base into the target in place. tensor: contiguous, bfloat16 or float16, of the size that was encoded.

    Raises WeightsError as `codec.apply` does, and before the first value is written.
    """
    values = _bits(tensor)
    units = codec.split_units(payload, len(values))
    streams = [kernel_numpy.as_arrays(*codec.load_streams(unit)) for unit in units]
    for unit, loaded in zip(units, streams, strict=True):
        if not _fits(unit.kind, unit.num_values, *loaded):
            raise codec.misfit(unit.start, unit.num_values)
    for unit, loaded in zip(units, streams, strict=True):
        _apply_unit(unit.kind, loaded, values[unit.start : unit.start + unit.num_values])


def _bits(tensor: "torch.Tensor") -> "torch.Tensor":
    """The bit patterns as int16, flat, over the same memory."""
    import torch

    if tensor.dtype not in (torch.bfloat16, torch.float16) or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "with strides"
        raise WeightsError(f"a tensor of {tensor.dtype}, {layout}; expected bfloat16 or float16, contiguous", retryable=False)
    return tensor.detach().reshape(-1).view(torch.int16)


def _scan_units(base: "torch.Tensor", target: "torch.Tensor", update: bool) -> list[Changes]:
    """The changes of some whole units and, maybe, a last shorter one. The device is waited for three times."""
    import torch

    unit_ends = [min(start + UNIT_VALUES, len(base)) for start in range(0, len(base), UNIT_VALUES)]
    positions = torch.nonzero(base != target).flatten()
    if not len(positions):
        return [_NOTHING for _ in unit_ends]
    new = target[positions]
    differences = new - base[positions]
    if update:
        base[positions] = new
    distances = _distances(positions)
    signed = differences.to(torch.int32)
    steps = (signed << 1) ^ (signed >> 31)
    is_wide, is_escape = steps >= WIDE, steps >= WIDE + ESCAPE
    ends = torch.stack((distances // SKIP + 1, is_wide, is_escape)).cumsum(1)  # of each code's bytes in the other three streams
    num_codes = torch.searchsorted(positions, torch.tensor(unit_ends, device=base.device))
    counts = torch.stack((num_codes, *torch.nn.functional.pad(ends, (1, 0))[:, num_codes])).tolist()
    num_gaps, num_wides, num_escapes = (count[-1] for count in counts[1:])
    gaps = torch.full((num_gaps,), SKIP, dtype=torch.uint8, device=base.device)
    gaps[ends[0] - 1] = (distances % SKIP).to(torch.uint8)
    wides = _kept((steps - WIDE).clamp(0, ESCAPE).to(torch.uint8), is_wide, ends[1], num_wides)
    escapes = _kept(differences, is_escape, ends[2], num_escapes)
    codes = steps.clamp(max=WIDE).to(torch.uint8)
    return _split(torch.cat((escapes.view(torch.uint8), gaps, codes, wides)).cpu().numpy(), *counts)


def _distances(positions: "torch.Tensor") -> "torch.Tensor":
    """How many unchanged values stand before each changed one in its unit."""
    import torch

    before = torch.nn.functional.pad(positions[:-1], (1, 0), value=-1)
    return positions - torch.maximum(before, positions // UNIT_VALUES * UNIT_VALUES - 1) - 1


def _kept(values: "torch.Tensor", keep: "torch.Tensor", ends: "torch.Tensor", count: int) -> "torch.Tensor":
    """values[keep], of which the count is known already, so that nobody waits for the device to count them."""
    import torch

    out = values.new_empty(count + 1)
    out[torch.where(keep, ends - 1, count)] = values  # the others all go to one place after the last
    return out[:count]


def _split(streams: Bytes, codes: list[int], gaps: list[int], wides: list[int], escapes: list[int]) -> list[Changes]:
    """The streams of each unit, from the streams of all, and how many codes, gaps, wides and escapes there are up to its end."""
    lengths = [2 * escapes[-1], gaps[-1], codes[-1]]
    all_escapes, all_gaps, all_codes, all_wides = np.split(streams, np.cumsum(lengths))
    return [
        Changes(g, c, w, e)
        for g, c, w, e in zip(
            np.split(all_gaps, gaps[:-1]),
            np.split(all_codes, codes[:-1]),
            np.split(all_wides, wides[:-1]),
            np.split(all_escapes, [2 * end for end in escapes[:-1]]),
            strict=True,
        )
    ]


def _fits(kind: int, num_values: int, first: Bytes, nibbles: Bytes, wides: Bytes, escapes: Bytes) -> bool:
    if kind == codec.SPARSE:
        return kernel_numpy.sparse_fits(num_values, first, nibbles, wides, escapes)
    return kind == codec.FULL or kernel_numpy.codes_fit(num_values, nibbles, wides, escapes)


def _apply_unit(kind: int, streams: Sequence[Bytes], values: "torch.Tensor") -> None:
    """One upload, then the streams are decoded where the values lie."""
    import torch

    first, nibbles, wides, escapes = streams
    parts = (escapes, first, nibbles, wides)  # escapes and full values first: their bytes are taken two at a time
    if not any(map(len, parts)):
        return
    uploaded = torch.from_numpy(np.concatenate(parts)).to(values.device)
    escapes_d, first_d, nibbles_d, wides_d = torch.split(uploaded, [len(part) for part in parts])
    if kind == codec.FULL:
        values.copy_(first_d.view(torch.int16))
    elif kind == codec.SPARSE:
        positions = _positions(first_d)
        values[positions] += _differences(len(positions), nibbles_d, wides_d, escapes_d)
    else:
        values += _differences(len(values), nibbles_d, wides_d, escapes_d)


def _positions(gaps: "torch.Tensor") -> "torch.Tensor":
    import torch

    names_value = gaps != SKIP
    ends = (gaps.to(torch.int64) + names_value).cumsum(0)
    return ends[names_value] - 1


def _differences(num_codes: int, nibbles: "torch.Tensor", wides: "torch.Tensor", escapes: "torch.Tensor") -> "torch.Tensor":
    """The difference behind each code, of streams that fit."""
    import torch

    codes = torch.stack((nibbles & 15, nibbles >> 4), 1).flatten()[:num_codes]
    wide_differences = _unzigzag(wides.to(torch.int16) + WIDE)
    wide_differences[wides == ESCAPE] = escapes.view(torch.int16)
    differences = _unzigzag(codes.to(torch.int16))
    differences[codes == WIDE] = wide_differences
    return differences


def _unzigzag(steps: "torch.Tensor") -> "torch.Tensor":
    return (steps >> 1) ^ -(steps & 1)
