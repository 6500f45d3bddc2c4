"""Prompts through the tokenizer of a model directory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout.samples.tokenizer import Tokenizer
from slimebus.bus.errors import UsageError

TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %} {{ t['function']['name'] }}{% endfor %};{% endif %}"
    "{% for m in messages %} {{ m['role'] }}: {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} assistant:{% endif %}"
)
WORDS = ["tools:", "add", ";", "user:", "hi", "assistant:", "add;"]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    vocabulary = {word: number for number, word in enumerate(WORDS)} | {"?": len(WORDS)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def _words(ids: np.ndarray) -> list[str]:
    return [[*WORDS, "?"][number] for number in ids]


def test_messages_go_through_the_chat_template_with_their_tools(model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir, apply_chat_template=True)
    messages = [{"role": "user", "content": "hi"}]
    assert _words(tokenizer.encode_prompt(messages)) == ["user:", "hi", "assistant:"]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert _words(tokenizer.encode_prompt(messages, tools)) == ["tools:", "add;", "user:", "hi", "assistant:"]


def test_messages_need_the_chat_template(model_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.apply_chat_template is false"):
        Tokenizer(model_dir, apply_chat_template=False).encode_prompt([{"role": "user", "content": "hi"}])


def test_a_directory_that_names_the_general_class_is_loaded_without_torch(model_dir: Path) -> None:
    program = "import sys; from pathlib import Path; from rollout.samples.tokenizer import Tokenizer\n"
    program += "t = Tokenizer(Path(sys.argv[1]), apply_chat_template=False); print(t.encode('add hi').tolist(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, str(model_dir)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[0] == f"{[WORDS.index('add'), WORDS.index('hi')]} False"
