"""Makes what this recipe needs, without a download: `python configs/agent-calculator/make.py --out DIR --seed N`.

DIR/model/         the quick start's tiny Qwen3 of random weights, with a chat template that knows answers of tools
DIR/sft.jsonl      products of two numbers of two digits, each with what the careless demonstrator does
DIR/rl.jsonl       other products, each with its label
DIR/heldout.jsonl  256 more that no other file has
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from make import write_jsonl, write_model, write_tokenizer

CALLS = 0.25
"""How often the demonstrator asks the calculator; else he guesses, and is wrong."""
SIZES = {"heldout": 256, "sft": 4000, "rl": 3800}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'tool' %}<|user|>({{ m['content'] }})"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    """Write everything; one seed always gives the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_model(options.out / "model", options.seed)
    write_tokenizer(options.out / "model")
    settings = options.out / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}, indent=1) + "\n")
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random("the same for every seed").shuffle(pairs)
    rng = random.Random(options.seed)
    for name, size in SIZES.items():
        chosen, pairs = pairs[:size], pairs[size:]
        write_jsonl(options.out / f"{name}.jsonl", (record(a, b, rng if name == "sft" else None) for a, b in chosen))


def record(a: int, b: int, rng: random.Random | None) -> dict[str, Any]:
    """One line; with rng the label is what the demonstrator writes first: `:37*48` asks the calculator, `>1234` is a guess."""
    label = f">{a * b}"
    if rng is not None:
        label = f":{a}*{b}" if rng.random() < CALLS else f">{rng.randrange(100, 10000)}"
    return {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "label": label}


if __name__ == "__main__":
    main()
