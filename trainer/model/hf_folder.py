"""A Hugging Face directory on disk: its config, whether its parts fit together, and how one is written."""

import json
import shutil
from pathlib import Path
from typing import Any

from slimebus.bus.errors import DataError

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model directory. Raises DataError when it is missing or not JSON."""
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: {error}; expected a Hugging Face model directory") from None


def check_vocabulary(folder: str | Path) -> None:
    """Raise DataError when the tokenizer has ids that the model has no embedding for.

    A model may have more rows than the tokenizer has tokens (padding). A directory without tokenizer.json is not checked.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        return
    vocab_size = int(read_config(folder)["vocab_size"])
    tokens = vocabulary(json.loads(path.read_text()))
    token = max(tokens, key=tokens.__getitem__, default=None)
    if token is not None and tokens[token] >= vocab_size:
        raise DataError(
            f"{folder}: the tokenizer gives token {token!r} id {tokens[token]}, but the model's vocab_size is {vocab_size};"
            " model and tokenizer do not match, use the tokenizer that the model was made with"
        )


def vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Token to id, from a parsed tokenizer.json (a dictionary or, for Unigram, a list of pairs) with its added tokens."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    tokens = dict(vocab) if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
    tokens.update({added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])})
    return tokens


def write_folder(folder: str | Path, tensors: dict[str, Any], source: str | Path, dtype: str) -> None:
    """A model directory that transformers reloads: `tensors` (name to contiguous CPU tensor), and source's config and tokenizer.

    Written beside `folder` and renamed, so a reader never sees half of it; what was there is replaced.
    """
    from safetensors.torch import save_file

    target = Path(folder)
    building = target.with_name(target.name + ".part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    save_file(tensors, building / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in read_config(source).items() if key != "torch_dtype"} | {"dtype": dtype}
    (building / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        if (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, building / name)
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)
