"""`python -m rollout.embedded`."""

from rollout.embedded.cli import engine

if __name__ == "__main__":
    engine()
