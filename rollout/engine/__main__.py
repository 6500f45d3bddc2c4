"""`python -m rollout.engine`."""

from rollout.engine.cli import engine

if __name__ == "__main__":
    engine()
