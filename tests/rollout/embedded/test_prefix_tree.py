"""Which pages hold which prefix, against a list of all that was inserted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout.embedded.kv_cache import PAGE_TOKENS, PrefixTree

TOKENS = list(range(100, 100 + 3 * PAGE_TOKENS))


def test_what_goes_on_takes_the_place_of_what_it_continues():
    tree = PrefixTree()
    tree.insert("", TOKENS[:5], [1])
    assert tree.insert("", TOKENS[:20], [2, 3]) == [1]
    assert tree.insert("", TOKENS[:18], [4, 5]) == []
    assert tree.pages == {2, 3}


def test_the_first_to_be_forgotten_is_what_was_used_longest_ago_and_nothing_is_behind_it():
    tree = PrefixTree()
    tree.insert("", TOKENS[: 2 * PAGE_TOKENS], [1, 2])
    tree.insert("", [*TOKENS[:PAGE_TOKENS], 7], [1, 3])
    tree.insert("", [9, 9], [4])
    tree.match("", TOKENS)
    assert [tree.evict() for _ in range(4)] == [3, 4, 2, 1]
    assert tree.pages == set()


few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=2 * PAGE_TOKENS + 3)


@given(st.lists(few_tokens, max_size=8), few_tokens)
def test_the_longest_prefix_of_all_that_was_inserted_is_found(inserted: list[list[int]], asked: list[int]):
    tree, content, page = PrefixTree(), dict[int, list[int]](), 0
    for tokens in inserted:
        starts = range(0, len(tokens), PAGE_TOKENS)
        pages = [page := page + 1 for _ in starts]
        content |= {own: tokens[start : start + PAGE_TOKENS] for own, start in zip(pages, starts, strict=True)}
        tree.insert("", tokens, pages)
    pages, num_known = tree.match("", asked)
    shared = [
        next((i for i, pair in enumerate(zip(one, asked, strict=False)) if pair[0] != pair[1]), min(len(one), len(asked)))
        for one in inserted
    ]
    assert num_known == max(shared, default=0)
    assert [token for page in pages for token in content[page]][:num_known] == asked[:num_known]
