"""Rows of a parquet file, read once and then at random.

A row in the middle of a row group cannot be read without what stands before it, and row groups may be as large as the file. So the columns
that are used are copied at the start, batch by batch, to a temporary Arrow file of small batches; a row costs one read of its batch.
"""

import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from broker.source.jsonl import COPY_BYTES, OnBad, spill_file
from broker.source.spec import FileSpec
from slimebus.errors import DataError
from slimebus.prompt_record import MAX_RECORD_BYTES, PromptKeys, check_fields, record_of

BATCH_ROWS = 64
"""Of the temporary file: a row of a kB is read in 0.1 ms, and a million rows are 16,000 batches."""
READ_BUFFER_BYTES = 1024 * 1024
ALWAYS_IN_A_MESSAGE = ("role", "content")


class ParquetFile:
    """The rows of one parquet file or of its slice. Raises DataError naming file, column or row (from 1), and reason.

    Prompts are text, or a list of structs with a `role`; metadata is a struct or a map. Keys that are null in a message or a tool are left
    out, for parquet gives each struct of a column the same keys.
    """

    def __init__(self, spec: FileSpec, keys: PromptKeys, on_bad: OnBad, *, spill_dir: Path | None = None) -> None:
        self.path, self.keys = spec.path, keys
        self._arrow = _pyarrow(spec.path)
        self._spill = spill_file(spill_dir)
        weakref.finalize(self, self._spill.close)
        try:
            good = self._copy(on_bad)
            self._chosen = good[slice(spec.start, spec.stop)]
            spec.rows_of(len(good))
            self.digest = f"{_digest(spec.path)}[{spec.start}:{spec.stop}]"
            self._batches = self._arrow.ipc.open_file(self._spill)
        except (self._arrow.ArrowException, OSError) as bad:
            self._spill.close()
            raise DataError(f"prompt data {spec.path} cannot be read as parquet: {bad}") from None
        except BaseException:
            self._spill.close()
            raise

    def __len__(self) -> int:
        return len(self._chosen)

    def record(self, row: int) -> bytes:
        """The record of a row."""
        batch, place = divmod(self._chosen[row], BATCH_ROWS)
        return record_of(_fields(self._batches.get_batch(batch), place, self.keys), self.keys)

    def close(self) -> None:
        """Release the temporary file."""
        self._spill.close()

    # --- checking ---

    def _copy(self, on_bad: OnBad) -> Sequence[int]:
        """Copy the used columns; the rows that are good."""
        bad_rows: list[int] = []
        total = 0
        with self._arrow.parquet.ParquetFile(self.path, buffer_size=READ_BUFFER_BYTES, pre_buffer=False) as file:
            columns = self._columns(file.schema_arrow)
            writer = None
            for batch in _in_batches_of(self._arrow, file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)):
                batch = _without_dictionaries(self._arrow, batch)
                writer = writer or self._arrow.ipc.new_file(self._spill, batch.schema)
                if total == 0 or not self._is_clean(batch):
                    bad_rows += [total + row for row in self._bad_rows(batch, total, on_bad)]
                writer.write_batch(batch)
                total += batch.num_rows
            (writer or self._arrow.ipc.new_file(self._spill, self._arrow.schema([]))).close()
        if not bad_rows:
            return range(total)
        refused = set(bad_rows)
        return array("q", (row for row in range(total) if row not in refused))

    def _columns(self, schema: Any) -> list[str]:
        types, keys = self._arrow.types, self.keys
        if keys.prompt not in schema.names:
            raise DataError(f"{self.path}: no column {keys.prompt!r} (input_key); it has {', '.join(map(repr, schema.names[:12]))}")
        prompt = _value_type(types, schema.field(keys.prompt).type)
        if not _is_text(types, prompt) and not _is_list_of_structs(types, prompt, "role"):
            raise DataError(f"{self.path}: column {keys.prompt!r} is {prompt}; expected text, or a list of structs with a 'role'")
        metadata = schema.field(keys.metadata).type if keys.metadata in schema.names else self._arrow.null()
        if not (types.is_struct(metadata) or types.is_null(metadata) or (types.is_map(metadata) and _is_text(types, metadata.key_type))):
            raise DataError(f"{self.path}: column {keys.metadata!r} is {metadata}; expected a struct, or a map with text keys")
        if keys.tools in schema.names and not _is_list_of_structs(types, schema.field(keys.tools).type):
            raise DataError(f"{self.path}: column {keys.tools!r} is {schema.field(keys.tools).type}; expected a list of structs")
        return [name for name in schema.names if name in {keys.prompt, keys.label, keys.metadata, keys.tools}]

    def _is_clean(self, batch: Any) -> bool:
        """True when the columns as a whole show that no row can be bad."""
        compute, prompts = self._arrow.compute, batch.column(self.keys.prompt)
        if prompts.null_count or batch.nbytes > MAX_RECORD_BYTES:
            return False
        if not self._arrow.types.is_list(prompts.type) and not self._arrow.types.is_large_list(prompts.type):
            return bool(compute.min(compute.binary_length(prompts)).as_py() != 0)
        messages, shortest = prompts.flatten(), compute.min(compute.list_value_length(prompts)).as_py()
        return not messages.null_count and not messages.field("role").null_count and shortest != 0

    def _bad_rows(self, batch: Any, before: int, on_bad: OnBad) -> Iterator[int]:
        for row in range(batch.num_rows):
            try:
                fields = _fields(batch, row, self.keys)
                check_fields(fields, self.keys)
                record_of(fields, self.keys)
            except DataError as bad:
                on_bad(DataError(f"{self.path}: row {before + row + 1}: {bad.text}"))
                yield row


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"prompt data {path}: reading parquet needs pyarrow; pip install 'slimebus[parquet]'") from None
    return pyarrow


def _in_batches_of(arrow: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Batches of BATCH_ROWS rows but for the last, wherever row groups end."""
    held: list[Any] = []
    for batch in batches:
        while batch.num_rows:
            need = BATCH_ROWS - sum(piece.num_rows for piece in held)
            held.append(batch.slice(0, need))
            batch = batch.slice(need)
            if sum(piece.num_rows for piece in held) == BATCH_ROWS:
                yield held[0] if len(held) == 1 else arrow.concat_batches(held)
                held = []
    if held:
        yield arrow.concat_batches(held)


def _without_dictionaries(arrow: Any, batch: Any) -> Any:
    columns = [column.dictionary_decode() if arrow.types.is_dictionary(column.type) else column for column in batch.columns]
    return arrow.record_batch(columns, names=batch.schema.names)


def _fields(batch: Any, row: int, keys: PromptKeys) -> dict[str, Any]:
    (fields,) = batch.slice(row, 1).to_pylist()
    for key in (keys.prompt, keys.tools):
        if isinstance(fields.get(key), list):
            fields[key] = _without_nulls(fields[key])
    if isinstance(fields.get(keys.metadata), list):  # a map column gives pairs
        fields[keys.metadata] = dict(fields[keys.metadata])
    return fields  # type: ignore[no-any-return]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key in ALWAYS_IN_A_MESSAGE}
    return value


def _value_type(types: Any, kind: Any) -> Any:
    return kind.value_type if types.is_dictionary(kind) else kind


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_list_of_structs(types: Any, kind: Any, key: str = "") -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind)
    return bool(is_list and types.is_struct(kind.value_type) and (not key or kind.value_type.get_field_index(key) >= 0))


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(COPY_BYTES):
            digest.update(piece)
    return digest.hexdigest()
