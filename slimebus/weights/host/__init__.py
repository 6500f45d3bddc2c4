"""Versions in the shared memory of a host: files, folders, and workers that share a pull."""
