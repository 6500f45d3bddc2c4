from collections.abc import Callable

import pytest

from slimebus.telemetry.formatting import align_columns, format_count, format_duration, format_size

DURATIONS = {0.4: "0 s", 80.3: "80 s", 119.4: "119 s", 150: "150 s", 700: "12 min", 7200: "2.0 h", 11600: "3.2 h"}
COUNTS = {0: "0", 950: "950", 12_345: "12.3 k", 448_320: "448 k", 1_400_000: "1.4 M", 2e9: "2.0 G"}
SIZES = {0: "0 bytes", 1023: "1023 bytes", 1536: "1.5 KiB", 3 << 30: "3.0 GiB", 5 << 40: "5.0 TiB"}


@pytest.mark.parametrize(("read", "texts"), [(format_duration, DURATIONS), (format_count, COUNTS), (format_size, SIZES)])
def test_quantities_read_in_the_unit_that_fits(read: Callable[[float], str], texts: dict[float, str]) -> None:
    assert {number: read(number) for number in texts} == texts


def test_a_cell_neither_breaks_its_line_nor_moves_the_cursor() -> None:
    assert align_columns([("a\nb", 1), ("\x1b[2J", 2)]) == [r"a\nb     1", r"\x1b[2J  2"]
