"""A sample in the making: its task, its tokens, what hooks do with it."""
