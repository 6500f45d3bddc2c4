"""The running rows as tensors: what each row generated, and when it must end.

Legend: N rows at most, n rows in use (0..n-1, in the scheduler's order), G tokens generated at most, S stop ids.
"""

import torch
from torch.nn.functional import pad

from rollout.embedded.sequence import Sequence

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
