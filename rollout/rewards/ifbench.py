"""1 when a response follows every instruction of its prompt, by IFBench's own checks (https://arxiv.org/abs/2507.02833), else 0.

IFBench is no package: clone https://github.com/allenai/IFBench and put it on PYTHONPATH. The metadata has its `instruction_id_list` and
`kwargs`.
"""

import importlib.util
from typing import Any

from rollout.samples.response import Response


def missing() -> str:
    """Why it cannot be used here."""
    remedy = "clone https://github.com/allenai/IFBench, install its requirements and put it on PYTHONPATH"
    return "" if importlib.util.find_spec("evaluation_lib") else f"needs IFBench's evaluation_lib, which is in no package; {remedy}"


def reward(response: Response) -> float:
    """1.0 or 0.0. Raises KeyError without the instructions."""
    library: Any = importlib.import_module("evaluation_lib")
    about = response.task.metadata
    names, given = about["instruction_id_list"], about["kwargs"]
    arguments = [{name: value for name, value in one.items() if value is not None} for one in given]
    text = str(about.get("prompt_text", ""))
    example = library.InputExample(key=0, instruction_id_list=names, prompt=text, kwargs=arguments)
    return float(library.test_instruction_following_strict(example, {text: response.text}).follow_all_instructions)
