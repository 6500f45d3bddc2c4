"""Where a trainer's batches come from and what it reports: the broker, or a replay of a run; and who asks it to stop."""
