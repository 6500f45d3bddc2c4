"""What a run shows of itself: in the terminal, result table, report, advice, timeline."""
