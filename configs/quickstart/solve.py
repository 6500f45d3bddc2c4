"""Prints three held-out problems that an exported model solves, read and run by transformers alone."""

import argparse
import json
import warnings
from pathlib import Path

PROBLEMS = 24


def main() -> None:
    """Load the model, solve greedily, print the first three right ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="[path] Hugging Face directory")
    parser.add_argument("--problems", type=Path, required=True, help="[path] heldout.jsonl")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(arguments.model))
    model = AutoModelForCausalLM.from_pretrained(str(arguments.model))
    shown = 0
    for text in arguments.problems.read_text().splitlines()[:PROBLEMS]:
        row = json.loads(text)
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**prompt, max_new_tokens=56, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        work = tokenizer.decode(made, skip_special_tokens=True)
        if work.rpartition(">")[2] == str(row["label"]):
            print(f"  {row['prompt'][0]['content']:>9}   {work}")  # noqa: T201
            shown += 1
        if shown == 3:
            return
    if not shown:
        print(f"  it solved none of the first {PROBLEMS}")  # noqa: T201


if __name__ == "__main__":
    main()
