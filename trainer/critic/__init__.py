"""The critic of PPO: its own trainer process on the bus, `slimebus trainer RUN.yaml --role critic`. docs/critic.md."""
