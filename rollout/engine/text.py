"""Text to token ids and back, by the model's own tokenizer.json. An engine without one serves ids only."""

from __future__ import annotations

from pathlib import Path

from slimebus.errors import ConfigError


class TextCodec:
    """The tokenizer of a model directory; `skip_special` leaves special tokens out of the text."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (the tokenizers library raises bare Exception)
            raise ConfigError(f"{path} could not be read as a tokenizer: {error}") from None

    @classmethod
    def find(cls, model_path: Path) -> TextCodec | None:
        """The tokenizer of the model directory, or None where it has no tokenizer.json."""
        path = model_path / "tokenizer.json"
        return cls(path) if path.exists() else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens added as the tokenizer says."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """Text of token ids; an id that the tokenizer does not know gives nothing."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))
