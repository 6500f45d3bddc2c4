"""A tokenizer for tests: one token a character."""

from typing import Any

import numpy as np


class Letters:
    """As rollout.tokenizer.Tokenizer. end: the id of its end token, which decodes to nothing; None for no such token."""

    def __init__(self, end: int | None = 0) -> None:
        self.eos_token_id = end

    def encode_prompt(self, prompt: Any, tools: Any = None) -> np.ndarray:
        return self.encode(prompt if isinstance(prompt, str) else f"{prompt[0]['content']}{tools or ''}")

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(c) for c in text], np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return "".join(chr(i) for i in ids if i != self.eos_token_id)

    def decode_batch(self, rows: list[np.ndarray]) -> list[str]:
        return [self.decode(row) for row in rows]
