"""DAPO: GRPO with clip-higher, mean over tokens and a punishment of overlong answers. Yu et al., "DAPO" (2025), section 3.

Its dynamic sampling is rollout.dynamic_sampling_filter_path: check_reward_nonzero_std.
"""

from collections.abc import Iterator
from typing import Annotated

import numpy as np
from msgspec import Meta

from slimebus.bus.messages import NO_VERSION
from slimebus.config.schema import NonNegative
from trainer.algorithms.grpo import Grpo
from trainer.batches.batch import Batch


class Dapo(Grpo):
    """GRPO on r + overlong_penalty_factor * R_length: eq. 8 to 13 of the paper."""

    class Settings(Grpo.Settings, frozen=True):
        """Those of GRPO, clip-higher, and the punishment."""

        eps_clip_high: NonNegative | None = 0.28
        """[ratio] ... and above at 1 + eps_clip_high; empty: as eps_clip."""
        overlong_buffer_len: Annotated[int, Meta(ge=0)] = 0
        """[tokens] The last so many tokens of rollout_max_response_len cost reward, the more the later the answer ends; 0: none do."""
        overlong_penalty_factor: NonNegative = 1.0
        """[reward] What an answer of rollout_max_response_len tokens loses."""

    settings: Settings

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        buffer, longest = self.settings.overlong_buffer_len, self.config.rollout.rollout_max_response_len
        if buffer >= longest:
            yield f"algorithm.settings.overlong_buffer_len: {buffer}; expected less than rollout.rollout_max_response_len {longest}"

    def rewards(self, batch: Batch) -> np.ndarray:
        s, longest = self.settings, self.config.rollout.rollout_max_response_len
        lengths = batch.trajectory_sums(np.add.reduceat((batch["versions"] != NO_VERSION).astype(np.float64), batch.starts))
        # what the policy wrote of a trajectory, trained or masked
        return super().rewards(batch) + s.overlong_penalty_factor * overlong_punishment(lengths, longest, s.overlong_buffer_len)


def overlong_punishment(lengths: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """R_length of eq. 13, [S] in -1..0: 0 up to `longest - buffer` tokens, then falling by 1 / buffer a token to -1."""
    if not buffer:
        return np.zeros(len(lengths))
    return np.clip((longest - buffer - lengths) / buffer, -1.0, 0.0)
