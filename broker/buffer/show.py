"""One group for a person: what became of it, its prompt, its samples."""

import importlib
from collections.abc import Callable
from typing import Any

import msgspec

from broker.buffer.export import about_of
from broker.buffer.reader import Moment
from broker.state.groups import Group
from slimebus.config import Resolved
from slimebus.errors import SlimebusError
from slimebus.samples import Sample, decode_group

Decode = Callable[[list[int]], str]
MAX_IDS = 64
MAX_PROMPT_CHARS = 4000


def text_of(resolved: Resolved) -> Decode | None:
    """A function from token ids to text by the run's tokenizer; None where there is none on this machine."""
    try:
        file = resolved.model_dir / "tokenizer.json"
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    except (SlimebusError, ImportError):
        return None
    except Exception:  # noqa: BLE001 - the package raises bare Exception for a file that it cannot use; ids are shown then
        return None

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return decode


def as_object(moment: Moment, group: Group) -> dict[str, Any]:
    """Everything of a group, with its arrays as lists."""
    stored = moment.samples(group.id)
    samples = [] if stored is None else decode_group(stored.header.samples, stored.header.fields, stored.frames)
    headers = [] if stored is None else stored.header.samples
    rows = [
        {
            **msgspec.to_builtins(header),
            "tokens": s.tokens.tolist(),
            "loss_mask": s.loss_mask.tolist(),
            "rollout_logprobs": [repr(v) if v != v or v in (float("inf"), float("-inf")) else v for v in s.rollout_logprobs.tolist()],
            "extras": {name: {"dtype": array.dtype.name, "shape": list(array.shape)} for name, array in s.extras.items()},
        }
        for header, s in zip(headers, samples, strict=True)
    ]
    return {"group": group.id, **about_of(group), "prompt": moment.prompt(group.id), "samples": rows}


def in_lines(moment: Moment, group: Group, decode: Decode | None) -> list[str]:
    """A group as lines of text."""
    about = {name: value for name, value in about_of(group).items() if value not in ("", -1, 0)}
    lines = [f"group {group.id}: " + ", ".join(f"{name} {value}" for name, value in about.items())]
    prompt = moment.prompt(group.id)
    lines += [f"prompt: {_short(prompt.get('prompt'))}", f"label: {_short(prompt.get('label'))}"] if prompt else ["prompt: not kept"]
    if prompt and prompt.get("metadata"):
        lines.append(f"metadata: {_short(prompt['metadata'])}")
    stored = moment.samples(group.id)
    if stored is None:
        return [*lines, "no samples", ""]
    for i, sample in enumerate(decode_group(stored.header.samples, stored.header.fields, stored.frames)):
        lines += _sample(i, sample, decode)
    return [*lines, ""]


def _sample(i: int, sample: Sample, decode: Decode | None) -> list[str]:
    versions = ", ".join(f"{length} of version {version}" if version >= 0 else f"{length} given" for version, length in sample.versions)
    extras = "".join(f", {name} {array.dtype.name}{list(array.shape)}" for name, array in sample.extras.items())
    head = f"sample {i}: reward {sample.reward}, {sample.status}, {len(sample.tokens)} tokens ({versions}){extras}"
    answer = [int(t) for t, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    if decode is not None:
        return [head, f"  {decode(answer)!r}"]
    more = f" ... {len(answer) - MAX_IDS} more" if len(answer) > MAX_IDS else ""
    return [head, f"  trained token ids: {' '.join(map(str, answer[:MAX_IDS]))}{more}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_PROMPT_CHARS else f"{text[:MAX_PROMPT_CHARS]} ... {len(text) - MAX_PROMPT_CHARS} characters more"
