import pytest

from slimebus.telemetry.formatting import align_columns, format_count, format_duration, format_size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (80.3, "80 s"), (119.4, "119 s"), (150, "150 s"), (700, "12 min"), (7200, "2.0 h"), (11600, "3.2 h")],
)
def test_durations_read_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (950, "950"), (12_345, "12.3 k"), (448_320, "448 k"), (1_400_000, "1.4 M"), (2e9, "2.0 G")]
)
def test_counts_keep_three_digits(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_read_in_the_unit_that_fits(number: int, text: str) -> None:
    assert format_size(number) == text


def test_a_cell_neither_breaks_its_line_nor_moves_the_cursor() -> None:
    assert align_columns([("a\nb", 1), ("\x1b[2J", 2)]) == [r"a\nb     1", r"\x1b[2J  2"]
