"""Commands that need no role: up, status, eval, config, init."""
