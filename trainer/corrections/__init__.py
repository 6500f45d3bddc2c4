"""Weights for samples of another policy, one file each, found by the file's name: `algorithm.corrections`."""
