"""The delta of two versions of a tensor: its bytes, its inner loops, the rounding before it."""
