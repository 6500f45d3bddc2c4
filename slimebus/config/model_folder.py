"""A Hugging Face model directory without torch or transformers: its config, and whether its tokenizer is the model's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from slimebus.bus.errors import ConfigError

CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"
LENGTH_BYTES, MAX_HEADER_BYTES = 8, 100 << 20
"""Of a safetensors file: the length that it begins with, and most of the header behind it (the format's own limit)."""


class SavedTensor(msgspec.Struct):
    """What a header says of a tensor, or of the file (`__metadata__`, without offsets)."""

    data_offsets: tuple[int, int] = (0, 0)


def read_json(file: Path) -> dict[str, Any]:
    """The object in one of its JSON files. Raises ConfigError, which names the file and what is wrong with it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', error)}; expected a Hugging Face model directory") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Its config.json. Raises ConfigError."""
    return read_json(folder / CONFIG)


def vocab_size(folder: Path) -> int | None:
    """Rows of the model's embedding; None where its config does not say."""
    return _number(folder, "vocab_size")


def context_length(folder: Path) -> int:
    """Most tokens of a sequence (max_position_embeddings); 0 where its config does not say."""
    return _number(folder, "max_position_embeddings") or 0


def _number(folder: Path, name: str) -> int | None:
    config = read_config(folder)
    found = config.get(name) or config.get("text_config", {}).get(name)
    return int(found) if found else None


def vocabulary_problems(folder: Path) -> Iterator[str]:
    """A sentence when one of them cannot be read, or the tokenizer has ids that the model has no embedding for.

    A model may have more rows than the tokenizer has tokens (padding). A directory without tokenizer.json is not checked.
    """
    try:
        size = vocab_size(folder)
        tokens = _vocabulary(read_json(folder / TOKENIZER)) if size and (folder / TOKENIZER).is_file() else {}
    except ConfigError as bad:
        yield bad.text
        return
    token = max(tokens, key=tokens.__getitem__, default=None)
    if size and token is not None and tokens[token] >= size:
        yield (
            f"model.hf_checkpoint: {folder}: the tokenizer gives token {token!r} id {tokens[token]}, but the model's vocab_size is {size}; "
            "model and tokenizer do not match, use the tokenizer that the model was made with"
        )


def weights_problems(folder: Path) -> Iterator[str]:
    """A sentence for each file of its weights that is missing, cut short or no safetensors file; the weights themselves are not read."""
    named = set(read_json(folder / INDEX).get("weight_map", {}).values()) if (folder / INDEX).is_file() else set()
    missing = [folder / name for name in sorted(named) if not (folder / name).is_file()]
    yield from (f"{path}: no such file, which {INDEX} names; copy the model again" for path in missing)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = file.read(min(length, MAX_HEADER_BYTES))
        try:
            tensors = msgspec.json.decode(header, type=dict[str, SavedTensor])
        except (msgspec.DecodeError, UnicodeDecodeError) as bad:
            yield f"{path}: no safetensors file, or cut short: its header cannot be read ({bad}); copy the model again"
            continue
        size, needed = path.stat().st_size, LENGTH_BYTES + length + max((t.data_offsets[1] for t in tensors.values()), default=0)
        if size < needed:
            yield f"{path} is cut short: it has {size} bytes, and its header names {needed}; copy the model again"


def tokenizer_differences(folder: Path, other: Path) -> Iterator[str]:
    """A sentence when the tokenizers of two directories give one id to different tokens; those without tokenizer.json are not compared."""
    files = [folder / TOKENIZER, other / TOKENIZER]
    if folder == other or not all(file.is_file() for file in files):
        return
    mine, its = ({id: token for token, id in _vocabulary(read_json(file)).items()} for file in files)
    differing = [id for id in mine.keys() & its.keys() if mine[id] != its[id]]
    if differing:
        first = min(differing)
        yield (
            f"{other}: its tokenizer has {its[first]!r} for token id {first}, that of {folder} has {mine[first]!r} ({len(differing)} such "
            "ids); the models must have the same tokenizer"
        )


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Token to id, from tokenizer.json (a dictionary or, for Unigram, a list of pairs) with its added tokens."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    tokens = dict(vocab) if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
    return tokens | {added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])}
