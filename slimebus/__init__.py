"""What every role shares: messages, envelope, transport, weights, config, hooks, errors, clock, metrics, CLI root."""
