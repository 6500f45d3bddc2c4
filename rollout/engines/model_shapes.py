"""The shapes of the model that the engines were started with, against those that arrive."""

from collections.abc import Mapping
from pathlib import Path

from slimebus.bus.errors import WeightsError
from slimebus.weights.host.safetensors_file import read_model
from slimebus.weights.host.shared_folder import SharedVersion

TIED = "lm_head.weight"
"""Some checkpoints leave it out where it is the embedding."""


def shapes_of(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """By tensor name; empty where the directory has no safetensors."""
    try:
        return {name: tensor.shape for name, tensor in read_model(model_dir).items()}
    except WeightsError:
        return {}


def check_shapes(version: SharedVersion, expected: Mapping[str, tuple[int, ...]], model_dir: Path) -> None:
    """Raises WeightsError for a tensor that the model does not have: SGLang ends at a wrong shape and passes over an unknown name."""
    if not expected:
        return
    for name, tensor in version.tensors.items():
        wanted, problem = expected.get(name), ""
        if wanted is None and name != TIED:
            problem = f"is not in {model_dir}"
        if wanted is not None and wanted != tensor.shape:
            problem = f"has shape {list(tensor.shape)}, in {model_dir} {list(wanted)}"
        if problem:
            raise WeightsError(f"tensor {name} of version {version.version} {problem}; do trainer and worker have one model?")
