"""The F1 score of the words of a response and of its label.

As for SQuAD (https://arxiv.org/abs/1606.05250) and HotpotQA: lower case, without punctuation and articles; yes, no and noanswer only count
as a whole.
"""

import re
import string
from collections import Counter

from rollout.samples.response import Response

WHOLE = ("yes", "no", "noanswer")


def reward(response: Response) -> float:
    """From 0.0 to 1.0."""
    found, wanted = _words(response.text), _words(str(response.label))
    if found != wanted and any(" ".join(words) in WHOLE for words in (found, wanted)):
        return 0.0
    num_same = (Counter(found) & Counter(wanted)).total()
    return 2 * num_same / (len(found) + len(wanted)) if num_same else 0.0


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()
