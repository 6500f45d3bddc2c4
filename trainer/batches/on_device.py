"""Host arrays on the device, without the host waiting for the copy."""

from typing import Any

import numpy as np
import torch


def on_device(array: np.ndarray | torch.Tensor, device: Any) -> torch.Tensor:
    """The array as a tensor there (None: on the host). To a GPU it goes through page-locked memory, behind the work that is already queued:
    from ordinary memory the copy would wait for that work, and the host for the copy.
    """
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if device is None or torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
