"""Where prompts come from: files read by position, or a user's own stateful source."""

from broker.source.files import FileSource, NoPrompts
from broker.source.rows import FileRows

JsonlRows, JsonlSource = FileRows, FileSource

__all__ = ["FileRows", "FileSource", "JsonlRows", "JsonlSource", "NoPrompts"]
