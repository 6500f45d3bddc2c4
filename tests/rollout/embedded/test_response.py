"""The text of an answer ends where the stop string that ended it begins."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout.embedded.response import output_text


@pytest.mark.parametrize(("matched", "text"), [("lo", "hel"), ("l", "he"), ("zz", "hello"), ("", ""), (None, "hello")])
def test_the_text_ends_before_the_stop_string(matched: str | None, text: str) -> None:
    sampling = SimpleNamespace(no_stop_trim=False, skip_special_tokens=True)
    sequence = SimpleNamespace(finish_reason={"matched": matched}, sampling=sampling, output_ids=[1])
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "hello")
    assert output_text(cast(Any, sequence), cast(Any, tokenizer)) == text
