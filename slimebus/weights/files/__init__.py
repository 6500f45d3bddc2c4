"""Versions as files: model directories, delta files, a chain of them."""
