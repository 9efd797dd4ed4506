"""Converts text to tokens and back, for the command line."""

from collections.abc import Iterable
from typing import Protocol

from jaxkv.text.tokenizer import TextStream as TextStream


class TextCodec(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """A tokenizer for which every byte of UTF-8 is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")
