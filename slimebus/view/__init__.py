"""What a run shows of itself: live panel, chart, result table, report, timeline."""
