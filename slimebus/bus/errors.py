"""Errors with a stable code, one plain line of text, and whether a retry may help.

The same three travel on the wire as an `error` reply, so a client can raise what the server meant.
"""


class SlimebusError(Exception):
    """Something a person can act on: `text` names the thing, what was expected and the remedy.

    `code` is stable and documented in docs/protocol.md; `retryable` says whether the same request may succeed later.
    """

    code = "error"
    retryable = False

    def __init__(self, text: str, *, code: str | None = None, retryable: bool | None = None) -> None:
        super().__init__(text)
        self.text = text
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable


class UsageError(SlimebusError):
    """A mistake in what the user gave: config, arguments, data. The command ends with exit code 2."""

    code = "usage"


class ConfigError(UsageError):
    """A config value is unknown, of the wrong type or contradicts another."""

    code = "config"


class DataError(UsageError):
    """Prompt data is missing or malformed."""

    code = "data"


class HookError(SlimebusError):
    """A plug-in could not be imported or failed; the text names its import path."""

    code = "hook"


class ProtocolError(SlimebusError):
    """Bytes on the wire that are not a message of this protocol."""

    code = "protocol"


class Unreachable(SlimebusError):
    """No answer from a peer before the deadline; the text says who, where and how long."""

    code = "unreachable"
    retryable = True


class Fenced(SlimebusError):
    """A newer process of the same name has taken this one's place; this one must stop."""

    code = "fenced"


class WeightsError(SlimebusError):
    """Weights could not be pulled or verified; nothing unverified was served."""

    code = "weights"
    retryable = True


class FatalWeightsError(WeightsError):
    """Weights, or what was asked of them, that another try would find as wrong."""

    retryable = False


EXIT_FAILURE = 1
EXIT_USAGE = 2
