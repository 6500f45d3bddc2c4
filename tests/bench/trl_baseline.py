"""TRL's GRPOTrainer on the quick start's warm model, data, batch and hyper-parameters: what `bin/bench e2e` compares with.

    trl_baseline.py '{"model": DIR, "data": DIR, "steps": 40, "seed": 0}'

The data is what configs/quickstart/make.py wrote (rl.jsonl, heldout.jsonl). Runs in its own environment, .venv-trl, made from
bin/requirements-trl.txt when it is missing or older than that file. Progress goes to stderr; stdout gets one JSON line:

    {"samples_per_s", "time_to_090_s": seconds or null}

Seconds are of training alone: evaluation is not counted, nor is the first step in samples_per_s, which warms up. The time to
0.90 is interpolated between evaluations.
What still differs: TRL keeps groups without variance in the loss's denominator, and its deviation in a group is the unbiased one.
"""

import contextlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from own_environment import enter_environment

ROOT = Path(__file__).resolve().parents[2]

PROMPTS, GROUP = 32, 8
MAX_NEW_TOKENS = 56
LEARNING_RATE, WARMUP, SCHEDULE_STEPS = 1e-4, 10, 120
GOAL = 0.90
THREADS, EVAL_EVERY = 2, 10


def main() -> None:
    """See the head of this file."""
    enter_environment("trl")
    asked = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):  # TRL prints its own summary
        line = json.dumps(train(Path(asked["model"]), Path(asked["data"]), asked["steps"], asked["seed"]))
    print(line, flush=True)


def train(folder: Path, data: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train so many steps and give the result that the head of this file describes."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    heldout = rendered(tokenizer, read_jsonl(data / "heldout.jsonl"))
    prompts = rendered(tokenizer, read_jsonl(data / "rl.jsonl")[: steps * PROMPTS])
    score = recipe_reward(tokenizer)

    def exact(completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        return [score(ids, wanted) for ids, wanted in zip(completion_ids, label, strict=True)]

    config = GRPOConfig(
        output_dir=str(Path(sys.prefix) / "out"),
        max_steps=steps,
        seed=seed,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        num_iterations=1,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
        max_grad_norm=0.5,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP) * max(0.1, 1 - step / SCHEDULE_STEPS))
    clock = stopwatch(EVAL_EVERY, steps, lambda: accuracy(model, tokenizer, heldout, score))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[clock],
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    return result(clock.seconds, clock.curve)


def result(seconds: list[float], curve: list[tuple[int, float, float]]) -> dict[str, Any]:
    """The JSON line from the duration of each step and the points (step, seconds of training, accuracy)."""
    warm = seconds[1:] or seconds
    return {"samples_per_s": PROMPTS * GROUP * len(warm) / sum(warm), "time_to_090_s": time_to_goal(curve)}


def time_to_goal(curve: list[tuple[int, float, float]]) -> float | None:
    """Seconds until the accuracy reached GOAL, on a line between two evaluations; None if it never did."""
    for (_, start, below), (_, end, above) in zip([(0, 0.0, 0.0), *curve], curve, strict=False):
        if above >= GOAL:
            return start + (GOAL - below) / max(above - below, 1e-9) * (end - start)
    return None


def stopwatch(every: int, last: int, evaluate: Any) -> Any:
    """A trainer callback: `seconds` of each step, and `curve` from an evaluation before the first and after every `every`-th step."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.curve: list[tuple[int, float, float]] = []
            self.started = 0.0

        def note(self, step: int) -> None:
            spent = sum(self.seconds)
            self.curve.append((step, spent, evaluate()))
            say(f"step {step}/{last}  {spent:.1f} s  held-out accuracy {self.curve[-1][2]:.3f}")

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note(0)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self.started)
            if state.global_step % every == 0 or state.global_step == last:
                self.note(state.global_step)

    return Stopwatch()


def accuracy(model: Any, tokenizer: Any, records: list[dict[str, str]], score: Any) -> float:
    """Mean reward of greedy answers, 256 prompts at a time. Leaves the model in the mode it was in."""
    import torch

    was_training = model.training
    model.eval()
    total = 0.0
    for start in range(0, len(records), 256):
        chunk = records[start : start + 256]
        inputs = tokenizer([r["prompt"] for r in chunk], return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, temperature=None, max_new_tokens=MAX_NEW_TOKENS)
        answers = out[:, inputs["input_ids"].shape[1] :].tolist()
        total += sum(score(until_end(ids, tokenizer.eos_token_id), r["label"]) for ids, r in zip(answers, chunk, strict=True))
    model.train(was_training)
    return total / len(records)


def until_end(ids: list[int], end: int) -> list[int]:
    """The ids up to the stop token and with it; all of them where there is none."""
    return ids[: ids.index(end) + 1] if end in ids else ids


def recipe_reward(tokenizer: Any) -> Any:
    """configs/quickstart/reward.py as a function of (token ids with their stop token, label)."""
    path = ROOT / "configs" / "quickstart" / "reward.py"
    spec = importlib.util.spec_from_file_location("quickstart_reward", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def score(ids: list[int], label: str) -> float:
        ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(ids[:-1] if ended else ids)
        return float(module.reward(SimpleNamespace(text=text, finish_reason="stop" if ended else "length", label=label)))

    return score


def rendered(tokenizer: Any, records: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Each prompt as the text that the chat template makes of it."""
    return [
        {"prompt": tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True), "label": r["label"]}
        for r in records
    ]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def say(text: str) -> None:
    """Progress, on stderr: stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
