"""A tenth of the grade, 0 to 10, that a model gives: any server at rollout.rm_url with /v1/chat/completions.

A model as a judge: https://arxiv.org/abs/2306.05685.
"""

import re

from rollout.rewards.remote import ask
from rollout.samples.response import Response

QUESTION = """Grade the answer to a question, by its agreement with the reference answer.

Question: {prompt}

Reference answer: {label}

Answer: {text}

Reason briefly, then end with a line `Grade: N`, N from 0 (wrong) to 10 (right)."""
MAX_TOKENS = 1024


async def reward(response: Response, url: str) -> float:
    """From 0.0 to 1.0. Raises ValueError when the model names no grade."""
    text = QUESTION.format(prompt=response.prompt, label=response.label, text=response.text)
    messages = [{"role": "user", "content": text}]
    body = {"model": "default", "messages": messages, "temperature": 0.0, "max_tokens": MAX_TOKENS}
    answer = await ask(f"{url.rstrip('/')}/v1/chat/completions", body)
    said = str(answer["choices"][0]["message"]["content"])
    grades = re.findall(r"Grade:\s*(10|\d)(?![\d])", said)
    if not grades:
        raise ValueError(f"the model named no grade: {said[-200:]!r}")
    return int(grades[-1]) / 10
