"""Quantities and tables as people read them."""

import itertools
from collections.abc import Iterable, Sequence

from slimebus.bus.envelope import one_line


def format_duration(seconds: float) -> str:
    """`80 s`, `170 s`, `12 min`, `3.2 h`: two or three digits of the unit that fits."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_count(number: float) -> str:
    """`950`, `12.3 k`, `1.4 M`: three digits."""
    if abs(number) < 1e3:
        return f"{number:.0f}"
    value, unit = next((number / size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(number) >= size)
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.1f} {unit}"


def format_size(num_bytes: float) -> str:
    """`512 bytes`, `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def align_columns(rows: Iterable[Sequence[object]], header: Sequence[str] = (), *, gap: int = 2) -> list[str]:
    """Lines of plain text in which the cells of the rows stand below one another, however wide the terminal is.

    What peers put into a cell neither breaks the line nor reaches the terminal as a command.
    """
    cells = [[one_line(str(cell)) for cell in row] for row in itertools.chain([header] if header else [], rows)]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*cells, fillvalue="")]
    return [(" " * gap).join(map(str.ljust, row, widths)).rstrip() for row in cells]
