"""The world's own account of what was trained, kept beside the broker's and never read from it."""

from collections import Counter
from typing import TYPE_CHECKING

from simulation.actor import require

if TYPE_CHECKING:
    from simulation.trainer import Trainer

Steps = dict[int, tuple[str, ...]]
"""The groups trained in each step of a timeline."""


class Account:
    """What the broker cannot know: whose timeline survives, and which promises a power cut has released it from."""

    def __init__(self) -> None:
        self.lost_suffix = False
        self.may_repeat: set[str] = set()
        self.finished_steps: int | None = None
        """How many steps a trainer had trained when it said that it has finished; the most that any did."""
        self._weights: dict[tuple[str, int], Steps] = {}

    def tore_off(self, changed: set[tuple[str, str]]) -> None:
        """The last transactions are gone after their answers were sent: these groups may be trained again."""
        self.lost_suffix = True
        self.may_repeat |= {key for table, key in changed if table == "groups"}

    def published(self, trainer: "Trainer") -> None:
        """These weights are what the steps trained so far made of the model. A version told again, steps later, is still the same."""
        self._weights.setdefault((trainer.lineage, trainer.version), dict(trainer.trained))

    def finished(self, trainer: "Trainer") -> None:
        """This trainer has no step left to train."""
        self.finished_steps = max(self.finished_steps or 0, trainer.step)

    def is_ancestor(self, lineage: str, version: int, trainer: "Trainer") -> bool:
        """True when those weights are what this trainer's timeline has, or had on its way."""
        weights = self._weights.get((lineage, version))
        return weights is not None and all(trainer.trained.get(step) == groups for step, groups in weights.items())

    def trained(self, trainer: "Trainer", step: int) -> None:
        """A step is trained. Raises Broken when a group of it was trained before in the same timeline."""
        groups = trainer.trained[step]
        earlier = {group for s, names in trainer.trained.items() if s != step for group in names}
        repeated = sorted((earlier & set(groups)) - self.may_repeat)
        require(not repeated, f"{repeated} trained a second time, in step {step} of {trainer.lineage}")
        twice = [group for group, count in Counter(groups).items() if count > 1]
        require(not twice, f"{twice} more than once in step {step}")
