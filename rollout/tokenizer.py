"""Prompts to token ids and back, with the tokenizer of the model directory."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from slimebus.bus.errors import UsageError


def _load(model_dir: Path) -> Any:
    """The tokenizer that AutoTokenizer chooses; without its import of torch (3 s, 190 MB) where the directory says which class it is."""
    config = model_dir / "tokenizer_config.json"
    settings = config.read_text() if config.is_file() else ""
    if re.search(r'"tokenizer_class"\s*:\s*"PreTrainedTokenizerFast"', settings):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(model_dir))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_dir))


class Tokenizer:
    """The model's tokenizer. Special tokens are never added silently: a prompt is encoded as it stands."""

    def __init__(self, model_dir: Path, *, apply_chat_template: bool) -> None:
        self._tokenizer = _load(model_dir)
        self.apply_chat_template = apply_chat_template
        self.eos_token_id: int | None = self._tokenizer.eos_token_id

    def encode_prompt(self, prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> np.ndarray:
        """int32 [P]. A list of messages goes through the chat template, with the tools, ending where the assistant starts."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        if not self.apply_chat_template:
            raise UsageError("a prompt is a list of messages but data.apply_chat_template is false")
        text = self._tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=True)
        return self.encode(text)

    def encode(self, text: str) -> np.ndarray:
        """int32 [T]."""
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(self, ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """The text of these ids."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens))

    def decode_batch(self, rows: list[np.ndarray]) -> list[str]:
        """The text of each row of ids, special tokens left out."""
        return [str(text) for text in self._tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True)]
