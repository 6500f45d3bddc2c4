"""One group for a person: what became of it, its prompt, its samples."""

import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from broker.inspect.export import summary_of
from broker.inspect.reader import StoreSnapshot
from broker.state.groups import Group
from slimebus.bus.envelope import one_line
from slimebus.bus.samples import Sample, SampleRow, decode_group
from slimebus.config import Resolved

Decode = Callable[[list[int]], str]
MAX_IDS = 64
MAX_PROMPT_CHARS = 4000


def text_of(resolved: Resolved) -> Decode | None:
    """A function from token ids to text by the run's tokenizer; None where there is none on this machine."""
    try:
        file = resolved.model_dir / "tokenizer.json"
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the package raises bare Exception for a file that it cannot use; ids are shown then
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def as_object(snapshot: StoreSnapshot, group: Group) -> dict[str, Any]:
    """Everything of a group, with its arrays as lists."""
    stored = snapshot.samples(group)
    rows = [_as_object(sample) for sample in ([] if stored is None else decode_group(stored.frames))]
    return {"group": group.id, **summary_of(group), "prompt": snapshot.prompt(group.id), "samples": rows}


def _as_object(sample: Sample) -> dict[str, Any]:
    row = {"num_tokens": len(sample.tokens), **{name: getattr(sample, name) for name in SampleRow.__struct_fields__}}
    row |= {"tokens": sample.tokens.tolist(), "loss_mask": sample.loss_mask.tolist()}
    row["rollout_logprobs"] = [value if math.isfinite(value) else repr(value) for value in sample.rollout_logprobs.tolist()]
    extras = {name: {"dtype": array.dtype.name, "shape": list(array.shape)} for name, array in sample.extras.items()}
    return row | {"extras": extras}


def in_lines(snapshot: StoreSnapshot, group: Group, decode: Decode | None) -> list[str]:
    """A group as lines of text."""
    about = {name: value for name, value in summary_of(group).items() if value not in ("", -1, 0)}
    lines = [f"group {group.id}: " + ", ".join(f"{name} {value}" for name, value in about.items())]
    prompt = snapshot.prompt(group.id)
    lines += [f"prompt: {shortened(prompt.get('prompt'))}", f"label: {shortened(prompt.get('label'))}"] if prompt else ["prompt: not kept"]
    if prompt and prompt.get("metadata"):
        lines.append(f"metadata: {shortened(prompt['metadata'])}")
    lines = [one_line(line) for line in lines]
    stored = snapshot.samples(group)
    if stored is None:
        return [*lines, "no samples", ""]
    for i, sample in enumerate(decode_group(stored.frames)):
        lines += _sample(i, sample, decode)
    return [*lines, ""]


def _sample(i: int, sample: Sample, decode: Decode | None) -> list[str]:
    versions = ", ".join(f"{length} of version {version}" if version >= 0 else f"{length} given" for version, length in sample.versions)
    extras = "".join(f", {name} {array.dtype.name}{list(array.shape)}" for name, array in sample.extras.items())
    head = f"sample {i}: reward {sample.reward}, {sample.status}, {len(sample.tokens)} tokens ({versions}){extras}"
    return [head, *(f"  {mark}  {_run_text(ids, decode)}" for mark, ids in _runs(sample))]


def _runs(sample: Sample) -> Iterator[tuple[str, list[int]]]:
    """All tokens in order, in runs that are trained or masked (the prompt, what a tool or an environment answered)."""
    for mask, run in itertools.groupby(zip(sample.loss_mask.tolist(), sample.tokens.tolist(), strict=True), key=lambda pair: bool(pair[0])):
        yield "trained" if mask else "masked ", [token for _, token in run]


def _run_text(ids: list[int], decode: Decode | None) -> str:
    if decode is not None:
        return repr(decode(ids))
    more = f" ... {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
    return f"ids {' '.join(map(str, ids[:MAX_IDS]))}{more}"


def shortened(value: Any) -> str:
    """Text as it is, anything else as JSON; of long ones the beginning."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_PROMPT_CHARS else f"{text[:MAX_PROMPT_CHARS]} ... {len(text) - MAX_PROMPT_CHARS} characters more"
