"""A source of prompts that are nothing but numbers."""

from broker.state.prompt_source import Prompt, PromptSource


class NumberedPrompts(PromptSource):
    """Numbered prompts: `size` of them, `epochs` times over."""

    fingerprint = "numbers"

    def __init__(self, size: int, epochs: int) -> None:
        self.size, self.epochs = size, epochs

    @property
    def total(self) -> int:
        """Prompts of all epochs."""
        return self.size * self.epochs

    def id_at(self, position: int) -> str:
        """The prompt id of a position."""
        return f"{position // self.size}/{position % self.size}"

    def take(self, position: int) -> Prompt | None:
        """The prompt at a position, or None past the end."""
        if position >= self.total:
            return None
        return Prompt(self.id_at(position), position, b"prompt")

    def find(self, prompt_id: str) -> Prompt | None:
        """The prompt of an id."""
        epoch, row = map(int, prompt_id.split("/"))
        return self.take(epoch * self.size + row)
