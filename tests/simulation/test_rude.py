"""What is called rude is: nothing of it can be trained, and every field of a put is got wrong by something."""

from typing import Any

import msgspec
import pytest
from simulation.rude import FRAMES, HEADERS, TABLES

from slimebus.bus.messages import Field, Put
from slimebus.bus.sample_table import TOKEN_FIELDS, BadSamples, SampleTable, check_group, encode_table

SAMPLES = 2


def sound() -> list[bytes]:
    """The frames of a group as the simulated worker makes them: 2 samples of 4 tokens and a field of bytes."""
    fields = [
        *(Field(name=name, dtype=dtype) for name, dtype in TOKEN_FIELDS.items()),
        Field(name="truth", dtype="uint8", shapes=[[3], [0]]),
    ]
    table = SampleTable(num_tokens=[4, 4], versions=[[(-1, 2), (0, 2)]] * SAMPLES, fields=fields, reward=[1.0, None])
    return [encode_table(table), bytes(32), bytes([0, 0, 1, 1] * SAMPLES), bytes(32), b"abc"]


def spoiled_table(name: str) -> dict[str, Any]:
    table = msgspec.msgpack.decode(sound()[0])
    TABLES[name](table)
    return table


def test_a_sound_group_is_taken() -> None:
    check_group(sound(), num_samples=SAMPLES, newest=0, max_bytes=1 << 20)


@pytest.mark.parametrize("name", FRAMES)
def test_a_group_is_refused_with(name: str) -> None:
    with pytest.raises(BadSamples):
        check_group(FRAMES[name](sound()), num_samples=SAMPLES, newest=0, max_bytes=1 << 20)


def test_every_column_of_the_table_is_got_wrong_by_something() -> None:
    whole = msgspec.msgpack.decode(sound()[0])
    wrong = {key for name in TABLES for key, value in spoiled_table(name).items() if value != whole.get(key)}
    assert wrong == set(SampleTable.__struct_fields__)


def test_every_part_of_a_field_is_got_wrong_by_something() -> None:
    whole = msgspec.msgpack.decode(sound()[0])["fields"]
    tables = [spoiled_table(name)["fields"] for name in TABLES]
    fields = [pair for table in tables if len(table) == len(whole) for pair in zip(table, whole, strict=True)]
    assert {key for field, was in fields for key in field if field[key] != was.get(key)} == set(Field.__struct_fields__)


def test_every_field_of_the_header_is_got_wrong_by_something() -> None:
    put = Put(group="0/0", lease=1, lineage="L")
    wrong = {key for spoil in HEADERS.values() for key in Put.__struct_fields__ if getattr(spoil(put), key) != getattr(put, key)}
    assert wrong == set(Put.__struct_fields__)
