"""Prefixes that are reused, and that nobody sees it but in cached_tokens: logprobs are those of a computation from nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_model import save_model

VOCAB_SIZE = 48


def run(core: Any, *sequences: Any) -> None:
    core.add(list(sequences))
    while core.has_work:
        core.step()


def assert_exact(model: Any, sequence: Any) -> None:
    """Every logprob equals transformers' over the whole sequence without a cache, at temperature 1."""
    ids = torch.tensor([sequence.prompt + sequence.output_ids])
    with torch.no_grad():
        logprobs = model(ids, use_cache=False).logits[0, len(sequence.prompt) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(sequence.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sequence.output_logprobs), expected, atol=1e-5, rtol=0)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(count)]


def test_each_turn_computes_only_what_is_new(qwen3, core_of, sequence_of):
    path, model = qwen3
    core, rng, history = core_of(path), random.Random(0), []
    for turn in range(6):
        asked = tokens(rng, 9)
        sequence = sequence_of(f"{turn}.", history + asked, max_new_tokens=5)
        run(core, sequence)
        # All of the turn before but its last token, whose keys and values nobody needed yet.
        assert sequence.num_cached_tokens == max(0, len(history) - 1)
        assert_exact(model, sequence)
        history = sequence.tokens


def test_samples_of_one_prompt_share_it_however_they_come(qwen3, core_of, sequence_of):
    path, model = qwen3
    core, prompt = core_of(path), tokens(random.Random(1), 37)
    together = [sequence_of(f"{i}.", prompt, temperature=1.0) for i in range(3)]
    core.add(together)
    core.step()
    late = sequence_of("late.", prompt, temperature=1.0)  # while the others still run
    branch = sequence_of("branch.", prompt[:20] + tokens(random.Random(2), 10), temperature=1.0)
    run(core, late, branch)
    assert [one.num_cached_tokens for one in (*together, late, branch)] == [0, 36, 36, 36, 20]
    for sequence in (*together, late, branch):
        assert_exact(model, sequence)


def test_another_key_shares_nothing(qwen3, core_of, sequence_of):
    core, prompt = core_of(qwen3[0]), tokens(random.Random(1), 20)
    one, other = (sequence_of(key, prompt, cache_key=key) for key in ("v1", "v2"))
    run(core, one)
    run(core, other)
    assert (one.num_cached_tokens, other.num_cached_tokens) == (0, 0)


def test_a_scored_prompt_is_computed_from_where_its_scores_begin(qwen3, core_of, sequence_of):
    path, model = qwen3
    core, prompt = core_of(path), tokens(random.Random(3), 30)
    run(core, sequence_of("a", prompt))
    scored, beside = sequence_of("b", prompt, logprob_start=18, max_new_tokens=0), sequence_of("c", [3, 4])
    run(core, scored, beside)
    assert (scored.output_ids, scored.finish_reason) == ([], {"type": "length", "length": 0})
    assert_exact(model, beside)
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(rows[i, prompt[i + 1]]) for i in range(18, 29)]
    torch.testing.assert_close(scored.input_logprobs, expected, atol=1e-5, rtol=0)
    assert scored.num_cached_tokens == 18


def test_new_weights_see_nothing_of_the_old(qwen3, core_of, sequence_of, tmp_path):
    other = save_model(tmp_path, seed=7, head_dim=16, tie_word_embeddings=True)
    core, prompt = core_of(qwen3[0]), tokens(random.Random(4), 20)
    running = sequence_of("running.", prompt, max_new_tokens=12)
    core.add([running])
    core.step()
    core.swap_weights(core_of(tmp_path).model.weights, "v2")
    beside = sequence_of("beside.", prompt)
    run(core, beside)
    after = sequence_of("after.", [*prompt, *running.output_ids])  # running mixed both versions: nobody may go on from it
    run(core, after)
    assert (beside.num_cached_tokens, after.num_cached_tokens) == (0, 20)
    for sequence in (beside, after):
        assert_exact(other, sequence)


def test_weights_that_make_no_numbers_leave_nothing_behind(qwen3, core_of, sequence_of):
    path, model = qwen3
    core, good = core_of(path), core_of(path).model.weights
    broken = core_of(path).model.weights
    broken.embedding.fill_(float("nan"))
    core.swap_weights(broken, "broken")
    rng = random.Random(5)
    bad = [sequence_of(f"{i}.", tokens(rng, 20), max_new_tokens=30) for i in range(4)]
    run(core, *bad[:2])
    core.add(bad[2:])
    core.step()
    core.swap_weights(good, "good")
    run(core)
    healthy = [sequence_of(f"h{i}.", tokens(rng, 20), max_new_tokens=30) for i in range(4)]
    run(core, *healthy)
    for sequence in healthy:
        assert_exact(model, sequence)


def test_a_long_sequence_and_short_ones_run_together_in_what_they_need(qwen3, core_of, sequence_of):
    path, model = qwen3
    core, rng = core_of(path, kv_bytes=core_of(path).cache.bytes_per_token * 16 * 11), random.Random(6)
    long, shorts = sequence_of("long.", tokens(rng, 70), max_new_tokens=20), [sequence_of(f"{i}.", tokens(rng, 5)) for i in range(5)]
    core.add([long, *shorts])
    core.step()  # the long prompt alone fills a prefill
    core.step()
    assert len(core.scheduler.running) == 6
    run(core)
    for sequence in (long, *shorts):
        assert_exact(model, sequence)


def test_every_page_comes_back_whatever_ends_a_sequence(qwen3, core_of, sequence_of):
    path, model = qwen3
    core, rng = core_of(path, kv_bytes=core_of(path).cache.bytes_per_token * 16 * 14), random.Random(7)
    cache, sequences, shared = core.cache, [], tokens(rng, 24)
    for number in range(60):
        prompt = shared[: rng.randint(1, 24)] + tokens(rng, rng.randint(1, 20))
        sequences.append(sequence_of(f"{number}.", prompt, max_new_tokens=rng.randint(0, 30), temperature=1.0))
        core.add([sequences[-1]])
        core.step()
        if number % 7 == 0:
            core.retract()
        if number % 5 == 0:
            core.abort(lambda sequence, rid=f"{number}.": sequence.rid.startswith(rid))
    run(core)
    assert cache._num_pinned == 0
    assert sorted(cache._free + list(cache.tree.pages)) == list(range(1, cache.num_pages + 1))
    assert sum(sequence.num_cached_tokens for sequence in sequences) > 500
    for sequence in sequences:
        if sequence.output_ids:
            assert_exact(model, sequence)


def test_a_batch_too_large_for_its_window_is_read_from_its_pages(qwen3, core_of, sequence_of, monkeypatch: pytest.MonkeyPatch):
    path, model = qwen3
    core, rng = core_of(path), random.Random(9)
    monkeypatch.setattr("rollout.embedded.kv_cache.WINDOW_BYTES", 64 * core.cache.bytes_per_token)
    sequences = [sequence_of(f"{i}.", tokens(rng, 10 + i), max_new_tokens=4 + 6 * i) for i in range(4)]
    run(core, *sequences)  # 4 rows of 16 tokens fit, of 32 they do not, and the last one alone fits again
    for sequence in sequences:
        assert_exact(model, sequence)


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
def test_other_families_reuse_alike(family: str, tmp_path, core_of, sequence_of):
    model = save_model(tmp_path, family)
    core, prompt = core_of(tmp_path), tokens(random.Random(8), 40)
    for count in (20, 40):
        sequence = sequence_of(f"{count}.", prompt[:count])
        run(core, sequence)
        assert_exact(model, sequence)
    assert sequence.num_cached_tokens == 20
