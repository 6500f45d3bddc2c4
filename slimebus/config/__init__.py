"""One typed config for a run, shared by every role. schema.py says what there is, load.py where each value came from."""

from slimebus.config.load import Resolved, resolve
from slimebus.config.schema import RunConfig

__all__ = ["Resolved", "RunConfig", "resolve"]
