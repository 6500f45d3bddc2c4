"""Rewards: the built-in ones by name, a file each, and how any reward is called."""
