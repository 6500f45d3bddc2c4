"""The `slimebus` command: root, commands, config, hooks, logs, metrics, spans."""
