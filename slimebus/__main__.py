"""The `slimebus` command, also as `python -m slimebus`. Until a command begins, Ctrl-C ends the process at once, with exit code 130."""

import os
import signal
import sys
from types import FrameType


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(130)  # KeyboardInterrupt within an import may be swallowed, or printed and ignored


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # the working directory: what lies in it is the user's, and may be called like a module of ours

from slimebus.cli.root import main  # noqa: E402

if __name__ == "__main__":
    main()
