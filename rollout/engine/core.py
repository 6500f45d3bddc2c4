"""The engine without threads or sockets: add sequences, step, collect what finished.

A step is: admit what waits and prefill it in one batch, then decode one token for every running row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout.engine.batch import RunningBatch
from rollout.engine.kv_cache import KVCache
from rollout.engine.model import Model
from rollout.engine.model_weights import ModelWeights
from rollout.engine.sampling import SamplingRows, adjust_logits, sample
from rollout.engine.scheduler import Scheduler
from rollout.engine.sequence import Sequence, aborted, out_of_length, stopped

Decode = Callable[[list[int]], str]


class EngineCore:
    """Continuous batching over one model; not thread-safe, one thread calls it.

    `decode_text` turns token ids to text and is needed only for stop strings. `version` names the current weights.
    """

    def __init__(
        self, model: Model, cache: KVCache, scheduler: Scheduler, *, version: str = "default", seed: int | None = None,
        decode_text: Decode | None = None,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.scheduler = model, cache, scheduler
        self.version = version
        self.is_paused = False
        self.num_generated = 0
        self._batch = RunningBatch()
        self._num_special = 0
        self._decode_text = decode_text
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything now."""
        return not self.is_paused and bool(self.scheduler.waiting or self.scheduler.running)

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences, in order."""
        self.scheduler.add(sequences)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Generate at most one decode token a row; sequences that finished, and streaming ones that grew."""
        told = self._prefill_admitted()
        if self.scheduler.running:
            told += self._decode()
        return list(dict.fromkeys(told))

    # -- control -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def abort(self, selects: Callable[[Sequence], bool]) -> list[Sequence]:
        """End the selected sequences now, with what they have; returns them."""
        waiting = self.scheduler.remove_waiting(selects)
        rows = [row for row, sequence in enumerate(self.scheduler.running) if selects(sequence)]
        running = self._leave(rows)
        for sequence in waiting + running:
            sequence.finish(aborted(), self.version)
        return waiting + running

    @torch.inference_mode()
    def retract(self) -> None:
        """Send every running sequence back to the queue; its tokens stay, its keys and values are computed again."""
        self._batch.save(list(range(self._batch.num_rows)), self.scheduler.running)
        self.scheduler.retract_all()
        self._batch.num_rows = self._num_special = 0
        self.cache.drop()

    def swap_weights(self, weights: ModelWeights, version: str | None) -> None:
        """Serve `weights` from the next step on, as `version` (None: keep the name). Cached keys and values stay."""
        weights.take_over()
        self.model.weights = weights
        if version is not None:
            self.rename_version(version)

    def rename_version(self, version: str) -> None:
        """Call the current weights `version` from the next token on."""
        self._batch.save(list(range(self._batch.num_rows)), self.scheduler.running)
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            sequence.change_weights(self.version)
        self.version = version

    # -- one step ------------------------------------------------------------------------------------------------

    def _prefill_admitted(self) -> list[Sequence]:
        first = self._batch.num_rows
        admitted = self.scheduler.admit()
        if not admitted:
            return []
        self.cache.reserve(first + len(admitted), max(s.max_tokens for s in self.scheduler.running), rows_in_use=first)
        self._batch.add(admitted)
        self._num_special += sum(sequence.is_special for sequence in admitted)
        logits_BV = self._prefill(first, admitted)
        told = self._finish_empty(first, admitted)
        if told:  # rare: requests for zero tokens have left, and others have moved into their rows
            logits_BV = logits_BV[[admitted.index(sequence) for sequence in self.scheduler.running[first:]]]
        if len(logits_BV):
            told += self._sample(first, logits_BV)
        return told

    def _prefill(self, first: int, admitted: list[Sequence]) -> torch.Tensor:
        """Fill the cache rows of the admitted; logits [B, V] of the token after each."""
        token_lists = [tuple(sequence.prompt + sequence.output_ids) for sequence in admitted]
        distinct = {tokens: index for index, tokens in enumerate(dict.fromkeys(token_lists))}
        source = torch.tensor([distinct[tokens] for tokens in token_lists])
        longest = max(map(len, distinct))
        tokens_BP = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in distinct])
        hidden = self.model.prefill(tokens_BP, self.cache, (first, source))
        self._note_cached(admitted, token_lists)
        for index, sequence in enumerate(admitted):
            if sequence.logprob_start is not None and not sequence.output_ids:
                self._score_prompt(sequence, hidden[source[index]])
        last = torch.tensor([len(tokens) - 1 for tokens in distinct])
        return self.model.logits(hidden[torch.arange(len(distinct)), last])[source]

    def _note_cached(self, admitted: list[Sequence], token_lists: list[tuple[int, ...]]) -> None:
        """Prompts that shared another's prefill count as cached, as they would in a prefix cache."""
        seen: set[tuple[int, ...]] = set()
        for sequence, tokens in zip(admitted, token_lists, strict=True):
            if tokens in seen:
                sequence.num_cached_tokens = len(sequence.prompt) - 1
            seen.add(tokens)

    def _score_prompt(self, sequence: Sequence, hidden_PC: torch.Tensor) -> None:
        """Logprobs of the prompt's own tokens from `logprob_start` on, at temperature 1; the first has none."""
        start = sequence.logprob_start or 0
        targets = torch.tensor(sequence.prompt[start + 1 :], dtype=torch.int64)
        if not len(targets):
            return
        logprobs_PV = self.model.logits(hidden_PC[start : len(sequence.prompt) - 1]).log_softmax(-1)
        sequence.input_logprobs = logprobs_PV.gather(1, targets[:, None]).squeeze(1).tolist()
        if sequence.num_top_logprobs:
            sequence.input_top_logprobs = [_top(row, sequence.num_top_logprobs) for row in logprobs_PV]

    def _finish_empty(self, first: int, admitted: list[Sequence]) -> list[Sequence]:
        rows = [first + index for index, sequence in enumerate(admitted) if sequence.limit == 0]
        return self._finish(rows, [out_of_length(0) for _ in rows])

    def _decode(self) -> list[Sequence]:
        batch = self._batch
        rows = slice(0, batch.num_rows)
        return self._sample(0, self.model.decode(batch.last_token[rows], batch.position[rows], self.cache))

    def _sample(self, first: int, logits_BV: torch.Tensor) -> list[Sequence]:
        """Sample and record a token for rows first..n-1; sequences to tell of."""
        batch, running = self._batch, self.scheduler.running
        special = [(row, running[row]) for row in range(first, len(running)) if running[row].is_special] if self._num_special else []
        adjusted = [(row - first, int(batch.generated[row]), sequence) for row, sequence in special if sequence.sampling.is_adjusted]
        adjust_logits(logits_BV, adjusted)
        tokens, logprobs_BV = sample(logits_BV, self._sampling_rows(first, special), self._generator)
        ended = batch.append(first, tokens, logprobs_BV.gather(1, tokens[:, None]).squeeze(1))
        self.num_generated += len(tokens)
        reasons = {row: stopped(stop) if stop is not None else out_of_length(running[row].limit) for row, stop in ended}
        watched = [row for row, sequence in special if sequence.is_watched]
        streamed = self._look_at(watched, (first, tokens, logprobs_BV), reasons)
        return self._finish(list(reasons), list(reasons.values())) + streamed

    def _sampling_rows(self, first: int, special: list[tuple[int, Sequence]]) -> SamplingRows:
        batch = self._batch
        rows = slice(first, batch.num_rows)
        rowed = [(row - first, row, sequence.sampling) for row, sequence in special]
        return SamplingRows(
            temperature_B=batch.temperature[rows],
            greedy_B=batch.greedy[rows],
            filtered=[(index, sampling) for index, _, sampling in rowed if sampling.is_filtered],
            seeded=[(index, sampling.seed, int(batch.position[row])) for index, row, sampling in rowed if sampling.seed is not None],
        )

    def _look_at(
        self, rows: list[int], sampled: tuple[int, torch.Tensor, torch.Tensor], reasons: dict[int, dict[str, object]]
    ) -> list[Sequence]:
        """Per-token work of the few sequences that ask for it; may add a stop string to `reasons`.

        `sampled` is (first row, tokens, logprobs). Those that stream and have not ended are returned.
        """
        running = self.scheduler.running
        first, tokens, logprobs_BV = sampled
        self._batch.save(rows, [running[row] for row in rows])
        for row in rows:
            sequence = running[row]
            if sequence.num_top_logprobs:
                sequence.output_top_logprobs.append(_top(logprobs_BV[row - first], sequence.num_top_logprobs))
            if sequence.sampling.is_penalised:
                _count(sequence, int(tokens[row - first]), logprobs_BV.shape[1])
            matched = self._matched_stop(sequence)
            if matched is not None:
                reasons[row] = stopped(matched)
            if sequence.stream:
                sequence.update_spans(self.version)
        return [running[row] for row in rows if running[row].stream and row not in reasons]

    def _matched_stop(self, sequence: Sequence) -> str | None:
        if not sequence.sampling.stop or self._decode_text is None:
            return None
        # A token is at least one byte, so a stop string that just ended lies within its own length of tokens.
        window = max(len(stop.encode()) for stop in sequence.sampling.stop) + 1
        tail = self._decode_text(sequence.output_ids[-window:])
        return next((stop for stop in sequence.sampling.stop if stop in tail), None)

    def _finish(self, rows: list[int], reasons: list[dict[str, object]]) -> list[Sequence]:
        ended = self._leave(rows)
        for sequence, reason in zip(ended, reasons, strict=True):
            sequence.finish(reason, self.version)
        return ended

    def _leave(self, rows: list[int]) -> list[Sequence]:
        """Take rows out of the batch, closing the holes with the last rows; their sequences, outputs saved."""
        if not rows:
            return []
        ended = [self.scheduler.running[row] for row in rows]
        self._batch.save(rows, ended)
        self._num_special -= sum(sequence.is_special for sequence in ended)
        sources, targets = self.scheduler.remove_running(rows)
        if sources:
            source, target = torch.tensor(sources), torch.tensor(targets)
            self.cache.move_rows(source, target, int(self._batch.position[source].max()) + 1)
        self._batch.move_rows(sources, targets, len(self.scheduler.running))
        return ended


def _top(logprobs_V: torch.Tensor, count: int) -> list[tuple[float, int]]:
    values, tokens = logprobs_V.topk(min(count, len(logprobs_V)))
    return list(zip(values.tolist(), tokens.tolist(), strict=True))


def _count(sequence: Sequence, token: int, vocab_size: int) -> None:
    if sequence.token_counts is None:
        sequence.token_counts = torch.zeros(vocab_size)
    sequence.token_counts[token] += 1
