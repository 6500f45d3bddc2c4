"""Inference engines as a worker sees them: processes started here or attached by URL, their client, and the pool of them."""
