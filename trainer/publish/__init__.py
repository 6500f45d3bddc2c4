"""Each trained version served to workers: one part a publishing rank, announced when all are complete."""
