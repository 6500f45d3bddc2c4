"""What tests of several folders share is imported by its file's name: `from live_broker import LiveBroker`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "props"))
