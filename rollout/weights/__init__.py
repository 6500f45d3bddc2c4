"""Weights on the worker: pulled from the trainer, passed on to other workers, and loaded into every engine."""
