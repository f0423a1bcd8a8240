"""Between text and tokens: a checkpoint's tokenizer.json where there is one, else bytes."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any, Protocol

from hal.errors import CheckpointError, HalError

BYTE_VOCAB = 1024  # a vocabulary beyond this is no alphabet of bytes


class Text(Protocol):
    """Encodes a prompt, and decodes a stream of tokens piece by piece."""

    def encode(self, text: str) -> list[int]: ...

    def stream(self) -> Stream: ...


class Stream(Protocol):
    """Text as it becomes certain: a character may need several tokens."""

    def add(self, token: int) -> str: ...

    def end(self) -> str: ...


class Bytes:
    """Tokens 0 to 255 are bytes; others, such as an end marker, are no text."""

    def encode(self, text: str) -> list[int]:
        return list(_bytes(text))

    def stream(self) -> Stream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """The ``tokenizers`` library over a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Fast

            self._fast: Any = Fast.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - whatever the library raises
            raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(printable(text)).ids
        return ids

    def stream(self) -> Stream:
        return _TokenStream(self._fast)


class _TokenStream:
    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self._ids: list[int] = []
        self._said = ""

    def add(self, token: int) -> str:
        self._ids.append(token)
        text: str = self._fast.decode(self._ids)
        # an unfinished character decodes to the replacement sign
        return "" if text.endswith("\ufffd") else self._say(text)

    def end(self) -> str:
        return self._say(self._fast.decode(self._ids))

    def _say(self, text: str) -> str:
        new = text[len(self._said) :]
        self._said = text
        if new and len(self._ids) > 16:
            # what was said stays said: keep a short tail for the joins
            self._ids = self._ids[-4:]
            self._said = self._fast.decode(self._ids)
        return new


def _bytes(text: str) -> bytes:
    """The text as UTF-8; bytes of a command line that are none come as surrogate escapes."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise HalError(f"text cannot be written as bytes: {error.reason} at character {error.start}") from None


def printable(text: str) -> str:
    """The text with bytes that are no UTF-8 replaced."""
    return _bytes(text).decode(errors="replace")


def text_of(folder: Path, vocab: int) -> Text:
    """How a checkpoint writes text. Errors: CheckpointError where neither way is open."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer(path)
    if vocab <= BYTE_VOCAB:
        return Bytes()
    raise CheckpointError(f"{folder}: no tokenizer.json, and a vocabulary of {vocab} tokens is not one of bytes")
