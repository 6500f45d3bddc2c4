"""Owns prompts, leases, the sample buffer, admission, batches and their durable record."""
