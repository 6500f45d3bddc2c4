"""Makes everything that the quick start needs, without a download: `python configs/quickstart/make.py --out DIR --seed N`.

    DIR/model/         a tiny Qwen3 with random weights and its tokenizer, as Hugging Face lays them out
    DIR/sft.jsonl      the careless teacher's work: four tries at each of 4000 problems
    DIR/rl.jsonl       4800 problems with their sums: 150 steps of 32, none twice
    DIR/heldout.jsonl  512 problems that no other file has: what the result is measured on
    DIR/layout.jsonl   256 problems without a carry, which the teacher always gets right: what the warm-up is checked with

One seed always gives the same bytes. The weights, the SFT and the RL data vary with the seed, heldout and layout do not.
Only numpy, safetensors and tokenizers are needed: nothing here imports torch.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from task import Problem, answer, draw, draw_distinct, has_carry, question, work
from tokenizers import AddedToken, Tokenizer, decoders, models

SFT_PROBLEMS, TRIES = 4000, 4
RL_PROBLEMS = 32 * 150
HELDOUT_PROBLEMS = 512
LAYOUT_PROBLEMS = 256

SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>"]
VOCAB = {token: i for i, token in enumerate([*SPECIAL, *"0123456789+-*/=><,.;:()? abcdefgh"])}
PAD, END = VOCAB["<|pad|>"], VOCAB["<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(VOCAB),
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.05,
    "use_cache": True,
    "use_sliding_window": False,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": None,
    "torch_dtype": "float32",
}


def main() -> None:
    """Write model, tokenizer and problems under --out."""
    parser = argparse.ArgumentParser(description="Make the quick start's model, tokenizer and data.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; files in it are replaced")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights, the SFT and the RL data (default 0)")
    args = parser.parse_args()
    write_model(args.out / "model", args.seed)
    write_tokenizer(args.out / "model")
    write_data(args.out, args.seed)


def write_data(out: Path, seed: int) -> None:
    """The four jsonl files, one `{"prompt": messages, "label": text}` a line."""
    fixed = random.Random("written addition, 1")
    write_jsonl(out / "heldout.jsonl", (record(p, answer(p)) for p in draw_distinct(fixed, "heldout", HELDOUT_PROBLEMS)))
    easy = draw_distinct(fixed, "layout", LAYOUT_PROBLEMS, lambda p: not has_carry(p))
    write_jsonl(out / "layout.jsonl", (record(p, answer(p)) for p in easy))
    write_jsonl(out / "sft.jsonl", demonstrations(random.Random(f"sft {seed}")))
    write_jsonl(out / "rl.jsonl", (record(p, answer(p)) for p in draw_distinct(random.Random(f"rl {seed}"), "rl", RL_PROBLEMS)))


def demonstrations(rng: random.Random) -> Iterable[dict[str, Any]]:
    """Every problem once in random order, then all again: the teacher makes his mistakes anew at each try."""
    problems = [draw(rng, "sft") for _ in range(SFT_PROBLEMS)]
    for _ in range(TRIES):
        rng.shuffle(problems)
        for problem in problems:
            yield record(problem, work(problem, rng))


def record(problem: Problem, label: str) -> dict[str, Any]:
    """One line of prompt data."""
    return {"prompt": [{"role": "user", "content": question(problem)}], "label": label}


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One record a line, in order."""
    path.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records))


def write_tokenizer(out: Path) -> None:
    """One token a character; AutoTokenizer loads it."""
    tokenizer = Tokenizer(models.BPE(vocab=VOCAB, merges=[], unk_token="<|unk|>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "unk_token": "<|unk|>",
        "additional_special_tokens": ["<|user|>", "<|assistant|>"],
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", settings)


def write_model(out: Path, seed: int) -> None:
    """config.json, generation_config.json and fp32 weights, initialised as transformers would with this config."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", CONFIG)
    write_json(out / "generation_config.json", {"eos_token_id": END, "pad_token_id": PAD, "do_sample": True, "temperature": 1.0})
    save_file(weights(np.random.default_rng(seed)), out / "model.safetensors", metadata={"format": "pt"})


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal with the config's deviation; norms are 1 and the padding token's embedding is 0."""
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float32)
        else:
            tensors[name] = rng.standard_normal(shape, np.float32) * np.float32(CONFIG["initializer_range"])
    tensors["model.embed_tokens.weight"][PAD] = 0
    return tensors


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name; the output layer is the embedding."""
    hidden, mlp, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    layers = {f"layers.{i}.{name}": shape for i in range(CONFIG["num_hidden_layers"]) for name, shape in layer.items()}
    tensors = {"embed_tokens": (len(VOCAB), hidden), **layers, "norm": (hidden,)}
    return {f"model.{name}.weight": shape for name, shape in tensors.items()}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """One indented JSON file, keys in the given order."""
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
