"""Quantities as people read them."""


def duration(seconds: float) -> str:
    """`80 s`, `170 s`, `12 min`, `3.2 h`: two or three digits of the unit that fits."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def count(number: float) -> str:
    """`950`, `12.3 k`, `1.4 M`: three digits."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, " k"), (1e9, 1e6, " M")):
        if abs(number) < limit:
            value = number / divisor
            return f"{value:.0f}{unit}" if divisor == 1 or abs(value) >= 100 else f"{value:.1f}{unit}"
    return f"{number / 1e9:.1f} G"
