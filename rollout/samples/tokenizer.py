"""Prompts to token ids and back, with the tokenizer of the model directory."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from slimebus.bus.errors import UsageError

Messages = list[dict[str, Any]]
MARK = "slimebus-4f1d9a6c"
"""Stands for a reply in a rendered conversation: what follows it follows the reply."""


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

    def __init__(self, model_dir: Path, *, apply_chat_template: bool, template_kwargs: dict[str, Any] | None = None) -> None:
        """template_kwargs: what the chat template gets besides messages and tools, such as enable_thinking."""
        self._tokenizer = _load(model_dir)
        self.apply_chat_template, self._template_kwargs = apply_chat_template, template_kwargs or {}
        self.eos_token_id: int | None = self._tokenizer.eos_token_id

    def encode_prompt(self, prompt: str | Messages, tools: Messages | None = None) -> np.ndarray:
        """int32 [P]. A list of messages goes through the chat template, with the tools, ending where the assistant starts."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        if not self.apply_chat_template:
            raise UsageError("a prompt is a list of messages but data.apply_chat_template is false")
        return self.encode(self._render(prompt, tools))

    def encode_turn(self, known: Messages, new: Messages, tools: Messages | None = None, *, end: int | None = None) -> np.ndarray:
        """What the chat template puts behind the reply known[-1]: its end, the new messages, the start of the next reply; int32 [T].

        The reply stays as it was sampled, also where the template would write it differently now that others follow it (Qwen3 leaves out
        the reasoning of earlier turns). end: the reply's last token, left out where the template's text begins with it. Raises UsageError
        for a template that does not write a reply as it is.
        """
        *before, reply = known
        marked = [*before, {"role": reply["role"], "content": MARK}]
        try:
            _, found, text = self._render([*marked, *new], tools).partition(MARK)
        except Exception:  # noqa: BLE001  a template may refuse a tool's answer that no call precedes: then by what the new messages add
            _, found, text = self._render(marked, tools, opens_reply=False).partition(MARK)
            without, whole = self._render(known, tools, opens_reply=False), self._render([*known, *new], tools)
            found, text = found if whole.startswith(without) else "", text + whole[len(without) :]
        if not found:
            raise UsageError(
                "the chat template changes a reply once others follow it, so that no turn can be added to what was sampled; "
                "give generate() the whole context, which begins another sample"
            )
        return self.encode(text if end is None else text.removeprefix(self._tokenizer.decode([end], skip_special_tokens=False)))

    def _render(self, messages: Messages, tools: Messages | None, *, opens_reply: bool = True) -> str:
        own = {"tools": tools, "tokenize": False, "add_generation_prompt": opens_reply}
        return str(self._tokenizer.apply_chat_template(messages, **(self._template_kwargs | own)))

    def encode(self, text: str) -> np.ndarray:
        """int32 [T]."""
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(self, ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """The text of these ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def decode_batch(self, rows: list[np.ndarray]) -> list[str]:
        """The text of each row of ids, special tokens left out."""
        return [str(text) for text in self._tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True)]
