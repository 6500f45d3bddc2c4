"""Weights from the trainer to the engines: a delta codec, versions, a verified pull, and model files. See docs/weights.md."""
