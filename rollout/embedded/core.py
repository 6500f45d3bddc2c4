"""The engine without threads or sockets: add sequences, step, collect what finished.

A step is: admit what waits and prefill it in one batch, then decode one token for every running row.
"""

from collections.abc import Callable

import torch
from tokenizers import Tokenizer

from rollout.embedded.batch import RunningBatch
from rollout.embedded.kv_cache import KVCache
from rollout.embedded.model import Model
from rollout.embedded.model_weights import ModelWeights
from rollout.embedded.sampling import adjust_logits, sample
from rollout.embedded.scheduler import Scheduler
from rollout.embedded.sequence import Sequence, aborted, out_of_length, stopped


class EngineCore:
    """Continuous batching over one model; not thread-safe, one thread calls it.

    The tokenizer is needed only for stop strings. `version` names the current weights.
    """

    def __init__(
        self, model: Model, cache: KVCache, scheduler: Scheduler, *, version: str = "default", seed: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.scheduler = model, cache, scheduler
        self.version = version
        self.is_paused = False
        self.num_generated = 0
        self.tokenizer = tokenizer
        self._batch = RunningBatch(scheduler.max_running)
        self._generator = torch.Generator()
        self._generator.manual_seed(self._generator.seed() if seed is None else seed)

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
        reported = self._prefill_admitted()
        if self.scheduler.running:
            batch, rows = self._batch, slice(0, self._batch.num_rows)
            placed = [sequence.pages for sequence in self.scheduler.running]
            logits_BV = self.model.decode(batch.last_token[rows], batch.position[rows], batch.pages[rows], self.cache, placed)
            reported += self._sample(0, logits_BV)
        return list(dict.fromkeys(reported))

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
        """Send every running sequence back to the queue; its tokens stay, its keys and values as long as there is room."""
        self._batch.save(list(range(self._batch.num_rows)), self.scheduler.running)
        for sequence in self.scheduler.running:
            self.cache.release(sequence)
        self.scheduler.retract_all()
        self._batch.num_rows = 0

    def swap_weights(self, weights: ModelWeights, version: str | None) -> None:
        """Serve `weights` from the next step on, as `version` (None: keep the name). Who runs keeps its keys and values, for itself."""
        weights.take_over()
        self.model.weights = weights
        self._batch.save(list(range(self._batch.num_rows)), self.scheduler.running)
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            sequence.change_weights(self.version)
        self.cache.flush()
        self.version = self.version if version is None else version

    # -- one step ------------------------------------------------------------------------------------------------

    def _prefill_admitted(self) -> list[Sequence]:
        known, new = self.scheduler.admit()
        first = self._batch.num_rows + len(known)
        for sequence in known + new:
            sequence.num_cached_tokens = sequence.num_cached_tokens if sequence.output_ids else sequence.num_known
        self.cache.copy_begun()
        if known or new:
            self._batch.add(known + new)
        if not new:
            return []
        logits_BV = self._prefill(first, new)
        reported = self._finish({first + index: out_of_length(0) for index, sequence in enumerate(new) if sequence.limit == 0})
        if reported:  # rare: requests for zero tokens have left, and others have moved into their rows
            logits_BV = logits_BV[[new.index(sequence) for sequence in self.scheduler.running[first:]]]
        if len(logits_BV):
            reported += self._sample(first, logits_BV)
        return reported

    def _prefill(self, first: int, new: list[Sequence]) -> torch.Tensor:
        """Fill the pages of these, in rows from `first` on; logits [B, V] of the token after each."""
        token_lists = [sequence.tokens[sequence.num_known :] for sequence in new]
        longest = max(map(len, token_lists))
        tokens_BP = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in token_lists])
        lengths, starts = torch.tensor([len(tokens) for tokens in token_lists]), torch.tensor([sequence.num_known for sequence in new])
        hidden = self.model.prefill(tokens_BP, lengths, starts, self._batch.pages[first : self._batch.num_rows], self.cache)
        for sequence, hidden_PC in zip(new, hidden, strict=True):
            self.cache.remember(sequence, len(sequence.tokens))
            if sequence.is_scored:
                self._score_prompt(sequence, hidden_PC)
        return self.model.logits(hidden[torch.arange(len(new)), lengths - 1])

    def _score_prompt(self, sequence: Sequence, hidden_PC: torch.Tensor) -> None:
        """Logprobs of the prompt's own tokens from `logprob_start` on, at temperature 1; the first has none."""
        start = sequence.logprob_start or 0
        targets = torch.tensor(sequence.prompt[start + 1 :], dtype=torch.int64)
        if not len(targets):
            return
        hidden_PC = hidden_PC[start - sequence.num_known : len(sequence.prompt) - 1 - sequence.num_known]
        logprobs_PV = self.model.logits(hidden_PC).log_softmax(-1)
        sequence.input_logprobs = logprobs_PV.gather(1, targets[:, None]).squeeze(1).tolist()

    def _sample(self, first: int, logits_BV: torch.Tensor) -> list[Sequence]:
        """Sample and record a token for rows first..n-1; those to report."""
        batch, running = self._batch, self.scheduler.running
        special = [(row, running[row]) for row in range(first, len(running)) if running[row].is_special]
        adjusted = [(row - first, int(batch.generated[row]), sequence) for row, sequence in special if sequence.sampling.is_adjusted]
        adjust_logits(logits_BV, adjusted)
        rows = slice(first, batch.num_rows)
        filtered = {row - first: s.sampling for row, s in special if s.sampling.is_filtered}
        seeded = {row - first: (seed, int(batch.position[row])) for row, s in special if (seed := s.sampling.sampling_seed) is not None}
        temperature, greedy = batch.temperature[rows], batch.greedy[rows]
        tokens, logprobs_BV = sample(logits_BV, temperature, greedy, self._generator, filtered=filtered, seeded=seeded)
        ended = batch.append(first, tokens, logprobs_BV.gather(1, tokens[:, None]).squeeze(1))
        self.num_generated += len(tokens)
        reasons = {row: stopped(stop) if stop is not None else out_of_length(running[row].limit) for row, stop in ended}
        watched = [row for row, sequence in special if sequence.is_watched]
        streamed = self._check_watched(watched, reasons)
        return self._finish(reasons) + streamed

    def _check_watched(self, rows: list[int], reasons: dict[int, dict[str, object]]) -> list[Sequence]:
        """Per-token work of the few sequences that ask for it; may add a stop string to `reasons`.

        Those that stream and have not ended are returned.
        """
        running = self.scheduler.running
        self._batch.save(rows, [running[row] for row in rows])
        for row in rows:
            sequence = running[row]
            if (matched := self._matched_stop(sequence)) is not None:
                reasons[row] = stopped(matched)
            if sequence.stream:
                sequence.update_spans(self.version)
        return [running[row] for row in rows if running[row].stream and row not in reasons]

    def _matched_stop(self, sequence: Sequence) -> str | None:
        if not sequence.sampling.stop or self.tokenizer is None:
            return None
        # A token is at least one byte, so a stop string that just ended lies within its own length of tokens.
        window = max(len(stop.encode()) for stop in sequence.sampling.stop) + 1
        # It may be a special token's text, as SGLang takes it.
        tail = self.tokenizer.decode(sequence.output_ids[-window:], skip_special_tokens=False)
        return next((stop for stop in sequence.sampling.stop if stop in tail), None)

    def _finish(self, reasons: dict[int, dict[str, object]]) -> list[Sequence]:
        """End the sequences of these rows."""
        ended = self._leave(list(reasons))
        for sequence, reason in zip(ended, reasons.values(), strict=True):
            sequence.finish(reason, self.version)
        return ended

    def _leave(self, rows: list[int]) -> list[Sequence]:
        """Take rows out of the batch, closing the holes with the last rows; their sequences, outputs saved."""
        if not rows:
            return []
        ended = [self.scheduler.running[row] for row in rows]
        self._batch.save(rows, ended)
        sources, targets = self.scheduler.remove_running(rows)
        for sequence in ended:
            self.cache.release(sequence)
        self._batch.move_rows(sources, targets, len(self.scheduler.running))
        return ended
