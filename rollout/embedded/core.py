"""The engine without sockets: add sequences, step, collect what finished; and the thread that does so.

A step is: admit what waits and prefill it in one batch, then decode one token for every running row. The rows are tensors: what each
generated, and when it must end.

Legend: N rows at most, n rows in use (0..n-1, in the scheduler's order), G tokens generated at most, S stop ids.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from torch.nn.functional import pad

from rollout.embedded.kv_cache import KVCache
from rollout.embedded.model import EmbeddedModel
from rollout.embedded.model_weights import ModelWeights
from rollout.embedded.sampling import adjust_logits, sample
from rollout.embedded.scheduler import Scheduler
from rollout.embedded.sequence import Sequence, aborted, out_of_length, stopped

NO_TOKEN = -1


class RunningBatch:
    """Per-row state of the decode loop, kept in tensors so that a step costs no Python per token."""

    def __init__(self, max_rows: int) -> None:
        self.num_rows = 0
        # position: of last_token, which the cache does not hold yet; pages: of the cache, 0 after the last
        self.last_token, self.position, self.generated, self.limit = (torch.zeros(max_rows, dtype=torch.int64) for _ in range(4))
        self.stop_ids, self.pages, self.tokens = (torch.zeros(max_rows, 0, dtype=torch.int64) for _ in range(3))
        self.temperature, self.greedy = torch.ones(max_rows), torch.zeros(max_rows, dtype=torch.bool)
        self.logprobs = torch.zeros(max_rows, 0)

    def _widen(self, max_new: int, num_stops: int, num_pages: int) -> None:
        """Room for so many generated tokens, stop ids and pages a row; contents are kept."""
        if (missing := max_new - self.tokens.shape[1]) > 0:
            grown = max(missing, self.tokens.shape[1])
            self.tokens, self.logprobs = pad(self.tokens, (0, grown)), pad(self.logprobs, (0, grown))
        if (missing := num_stops - self.stop_ids.shape[1]) > 0:
            self.stop_ids = pad(self.stop_ids, (0, missing), value=NO_TOKEN)
        if (missing := num_pages - self.pages.shape[1]) > 0:
            self.pages = pad(self.pages, (0, missing))

    def add(self, sequences: list[Sequence]) -> None:
        """Append a row for each sequence, with the tokens it already has."""
        self._widen(max(s.limit for s in sequences), max(len(s.stop_ids) for s in sequences), max(len(s.pages) for s in sequences))
        rows, width = slice(self.num_rows, self.num_rows + len(sequences)), self.stop_ids.shape[1]
        self.last_token[rows] = torch.tensor([(s.output_ids or s.prompt)[-1] for s in sequences])
        self.position[rows] = torch.tensor([len(s.prompt) + len(s.output_ids) - 1 for s in sequences])
        self.pages[rows] = torch.tensor([[*s.pages, *[0] * (self.pages.shape[1] - len(s.pages))] for s in sequences])
        self.generated[rows] = torch.tensor([len(s.output_ids) for s in sequences])
        self.limit[rows] = torch.tensor([s.limit for s in sequences])
        self.stop_ids[rows] = torch.tensor([[*s.stop_ids, *[NO_TOKEN] * (width - len(s.stop_ids))] for s in sequences])
        self.temperature[rows] = torch.tensor([s.sampling.logprob_temperature for s in sequences])
        self.greedy[rows] = torch.tensor([s.sampling.is_greedy for s in sequences])
        for row, sequence in enumerate(sequences, self.num_rows):
            if sequence.output_ids:
                self.tokens[row, : len(sequence.output_ids)] = torch.tensor(sequence.output_ids)
                self.logprobs[row, : len(sequence.output_ids)] = torch.tensor(sequence.output_logprobs)
        self.num_rows += len(sequences)

    def append(self, first: int, tokens: torch.Tensor, logprobs: torch.Tensor) -> list[tuple[int, int | None]]:
        """Record one token for rows first..n-1; the rows that end here, with the stop id that ended them or None."""
        rows = slice(first, self.num_rows)
        generated = self.generated[rows]
        index = torch.arange(first, self.num_rows) * self.tokens.shape[1] + generated
        self.tokens.view(-1).index_copy_(0, index, tokens)
        self.logprobs.view(-1).index_copy_(0, index, logprobs)
        self.last_token[rows] = tokens
        self.position[rows] += 1
        generated += 1
        is_stop = (tokens[:, None] == self.stop_ids[rows]).any(1)
        is_done = (is_stop | (generated >= self.limit[rows])).nonzero().squeeze(1).tolist()
        return [(first + row, int(tokens[row]) if is_stop[row] else None) for row in is_done]

    def save(self, rows: list[int], sequences: list[Sequence]) -> None:
        """Copy what the rows generated into their sequences."""
        if not rows:
            return
        index = torch.tensor(rows)
        longest = int(self.generated[index].max())
        tokens, logprobs = self.tokens[index, :longest].tolist(), self.logprobs[index, :longest].tolist()
        for count, ids, values, sequence in zip(self.generated[index].tolist(), tokens, logprobs, sequences, strict=True):
            sequence.output_ids, sequence.output_logprobs = ids[:count], values[:count]

    def move_rows(self, sources: list[int], targets: list[int], num_left: int) -> None:
        """Copy rows `sources` over rows `targets`; the first `num_left` rows remain."""
        if sources:
            source, target = torch.tensor(sources), torch.tensor(targets)
            for field in vars(self).values():
                if isinstance(field, torch.Tensor):
                    field[target] = field[source]
        self.num_rows = num_left


class EngineCore:
    """Continuous batching over one model; not thread-safe, one thread calls it.

    The tokenizer is needed only for stop strings. `version` names the current weights.
    """

    def __init__(
        self, model: EmbeddedModel, cache: KVCache, scheduler: Scheduler, *, version: str = "default", seed: int | None = None,
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
        """Generate at most one decode token a row; the sequences that finished."""
        finished = self._prefill_admitted()
        if self.scheduler.running:
            batch, rows = self._batch, slice(0, self._batch.num_rows)
            placed = [sequence.pages for sequence in self.scheduler.running]
            logits_BV = self.model.decode(batch.last_token[rows], batch.position[rows], batch.pages[rows], self.cache, placed)
            finished += self._sample(0, logits_BV)
        return finished

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
        finished = self._finish({first + index: out_of_length(0) for index, sequence in enumerate(new) if sequence.limit == 0})
        if finished:  # rare: requests for zero tokens have left, and others have moved into their rows
            logits_BV = logits_BV[[new.index(sequence) for sequence in self.scheduler.running[first:]]]
        if len(logits_BV):
            finished += self._sample(first, logits_BV)
        return finished

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
        """Sample and record a token for rows first..n-1; the sequences that finish."""
        batch, running = self._batch, self.scheduler.running
        special = [(row, running[row]) for row in range(first, len(running)) if running[row].is_special]
        adjusted = [(row - first, int(batch.generated[row]), sequence) for row, sequence in special if sequence.sampling.is_adjusted]
        adjust_logits(logits_BV, adjusted)
        rows = slice(first, batch.num_rows)
        filtered = {row - first: s.sampling for row, s in special if s.sampling.is_filtered}
        tokens, logprobs_BV = sample(logits_BV, batch.temperature[rows], batch.greedy[rows], self._generator, filtered)
        ended = batch.append(first, tokens, logprobs_BV.gather(1, tokens[:, None]).squeeze(1))
        self.num_generated += len(tokens)
        reasons = {row: stopped(stop) if stop is not None else out_of_length(running[row].limit) for row, stop in ended}
        watched = [row for row, sequence in special if sequence.is_watched]
        batch.save(watched, [running[row] for row in watched])
        for row in watched:
            if (matched := self._matched_stop(running[row])) is not None:
                reasons[row] = stopped(matched)
        return self._finish(reasons)

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


T = TypeVar("T")
Report = Callable[[list[Sequence]], None]


class DecodeLoop:
    """Owns the core's thread. `call` runs a function on it between two steps; `report` gets each step's sequences.

    `report` and `failed` are called on the decode thread; they must hand over quickly and not raise.
    """

    def __init__(self, core: EngineCore, report: Report, failed: Callable[[BaseException], object]) -> None:
        self._core, self._report, self._failed = core, report, failed
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; False when it did not end in time."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call(self, action: Callable[[EngineCore], T]) -> Future[T]:
        """Run `action(core)` on the decode thread between two steps; its result or exception is in the future.

        What a client asked for is done, whether it waits for the answer or not.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from now on nobody can cancel it

        def run() -> None:
            try:
                future.set_result(action(self._core))
            except Exception as error:  # noqa: BLE001 (carried to the caller)
                future.set_exception(error)

        with self._wake:
            self._inbox.append(run)
            self._wake.notify()
        return future

    def _run(self) -> None:
        try:
            while self._next_actions():
                if self._core.has_work and (reported := self._core.step()):
                    self._report(reported)
        except BaseException as error:  # noqa: BLE001 (the thread's boundary: the process must learn that it ended)
            self._failed(error)

    def _next_actions(self) -> bool:
        """Run what came in; waits while there is neither that nor work. False when the loop must end."""
        with self._wake:
            while not (self._inbox or self._is_stopping or self._core.has_work):
                self._wake.wait()
            actions = list(self._inbox)
            self._inbox.clear()
        for action in actions:
            action()
        return not self._is_stopping
