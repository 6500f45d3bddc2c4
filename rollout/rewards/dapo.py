"""1 when the last `Answer: ...` is the label after Minerva's normalisation, else -1.

DAPO (https://arxiv.org/abs/2503.14476, section 2.4) as its code does it: only the last 300 characters count. The normalisation is
listing 1 of Minerva (https://arxiv.org/abs/2206.14858, appendix D.1). Labels are integers: `34.0` is 34.
"""

import re

from rollout.samples.response import Response

SEARCHED_CHARS = 300
REPLACED = {"an ": "", "a ": "", ".$": "$", "\\$": "", r"\ ": "", " ": "", "mbox": "text", ",\\text{and}": ",", "\\text{and}": ","}
REPLACED |= {"\\text{m}": "\\text{}"}
WORDS = r"""square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm pounds
meters meals edges students childrentickets multiples \text{s} \text{.} \text{}^2 \text{}^3 \text{} \mathrm{th} ^\circ
^{\circ} \; ,\! {,} " \dots"""


def reward(response: Response) -> float:
    """1.0 or -1.0."""
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response.text[-SEARCHED_CHARS:])
    return 1.0 if found and normalised(found[-1]) == _integer(normalised(str(response.label))) else -1.0


def _integer(label: str) -> str:
    return label.partition(".")[0] if re.fullmatch(r"-?\d+\.0*", label) else label


def normalised(answer: str) -> str:
    """An answer without units, words and ways to write it."""
    answer = answer.split("=")[-1]
    for text, other in (*REPLACED.items(), *((word, "") for word in WORDS.split())):
        answer = answer.replace(text, other)
    answer = re.sub(r".*?(\$.*?\$).*", r"\1", answer)
    answer = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"(frac)([^{])(.)", r"\1{\2}{\3}", answer)
    answer = re.sub(r"(sqrt)([^{])", r"\1{\2}", answer).replace("$", "")
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer.strip()
