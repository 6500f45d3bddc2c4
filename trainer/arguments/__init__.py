"""Megatron's options and the settings that ranks share. megatron_options.py and megatron_check.py import Megatron; nothing else does."""
