"""Where prompts come from: files read by position, or a user's own stateful source."""

from broker.source.file_rows import FileRows
from broker.source.hook import HookSource, load_source
from broker.source.prompt_order import FileSource

__all__ = ["FileRows", "FileSource", "HookSource", "load_source"]
