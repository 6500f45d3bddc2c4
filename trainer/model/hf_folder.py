"""How a Hugging Face directory is written."""

import json
import shutil
from pathlib import Path
from typing import Any

from slimebus.model_folder import CONFIG, read_config
from slimebus.weights.files.safetensors_file import READABLE, copy_config


def write_folder(folder: str | Path, tensors: dict[str, Any], source: str | Path, dtype: str) -> None:
    """A model directory that transformers reloads: `tensors` (name to contiguous CPU tensor), and the small files of `source`.

    Written beside `folder` and renamed, so a reader never sees half of it; what was there is replaced.
    """
    from safetensors.torch import save_file

    target = Path(folder)
    building = target.with_name(target.name + ".part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    copy_config(Path(source), building)
    save_file(tensors, building / "model.safetensors", metadata={"format": "pt"})
    (building / "model.safetensors").chmod(READABLE)
    config = {key: value for key, value in read_config(Path(source)).items() if key != "torch_dtype"} | {"dtype": dtype}
    (building / CONFIG).write_text(json.dumps(config, indent=2))
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)
