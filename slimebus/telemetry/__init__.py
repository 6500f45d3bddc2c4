"""What a process records of itself: logs, metrics, spans; and how measured values are summed up and written."""
