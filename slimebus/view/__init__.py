"""What a run shows of itself: live panel, result table, report, timeline."""
