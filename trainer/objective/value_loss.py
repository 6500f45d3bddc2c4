"""The loss of a critic. Shapes are those of the arguments."""

import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2 per token, and where the clip took the gradient away.

    Baselines' PPO2; Engstrom et al., "Implementation Matters in Deep Policy Gradients" (2020), section 3. slime leaves out the half.
    """
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    free, bound = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(free, bound), (bound > free).float()
