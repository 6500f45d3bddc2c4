"""Turns the public GSM8K files into prompt data: `python make_data.py --train train.jsonl --test test.jsonl --out DIR`.

Reads lines of `{"question": ..., "answer": "... #### 72"}` and writes DIR/train.jsonl and DIR/test.jsonl, lines of
`{"prompt": [{"role": "user", ...}], "label": "72"}`. Nothing is downloaded.
"""

import argparse
import json
from pathlib import Path
from typing import Any

INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."


def main() -> None:
    """Convert the files named on the command line."""
    parser = argparse.ArgumentParser(description="Turn the public GSM8K files into prompt data.")
    parser.add_argument("--train", type=Path, required=True, metavar="FILE", help="GSM8K's train.jsonl")
    parser.add_argument("--test", type=Path, required=True, metavar="FILE", help="GSM8K's test.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    args = parser.parse_args()
    try:
        converted = {"train": convert(args.train), "test": convert(args.test)}
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as bad:
        parser.error(str(bad))
    for name, records in converted.items():
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        print(f"{args.out / name}.jsonl: {len(records)} prompts")  # noqa: T201


def convert(path: Path) -> list[dict[str, Any]]:
    """The prompt record of each line. Raises ValueError naming file, line and reason, OSError for a missing file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [record(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def record(line: str, place: str) -> dict[str, Any]:
    """One prompt record from one line of GSM8K."""
    try:
        problem = json.loads(line)
        question, solution = problem["question"], problem["answer"]
    except (json.JSONDecodeError, KeyError, TypeError) as bad:
        raise ValueError(f"{place}: expected a JSON object with question and answer ({type(bad).__name__}: {bad})") from None
    _, mark, label = str(solution).rpartition("####")
    if not mark or not label.strip():
        raise ValueError(f"{place}: the answer has no '#### number' at its end")
    return {"prompt": [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}], "label": label.strip().replace(",", "")}


if __name__ == "__main__":
    main()
