"""How a Hugging Face directory is written."""

import json
import shutil
from pathlib import Path
from typing import Any

from slimebus.model_folder import read_config

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)


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
    config = {key: value for key, value in read_config(Path(source)).items() if key != "torch_dtype"} | {"dtype": dtype}
    (building / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        if (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, building / name)
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)
