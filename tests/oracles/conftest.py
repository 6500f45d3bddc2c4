"""Megatron on a CPU: the rows of a batch need it."""

from trainer.compat import cpu_compat

cpu_compat.import_megatron()
