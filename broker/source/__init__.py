"""Where prompts come from: files read by position, or a user's own stateful source."""

from broker.source.files import FileSource
from broker.source.hook import HookSource, load_source
from broker.source.rows import FileRows

__all__ = ["FileRows", "FileSource", "HookSource", "load_source"]
