"""Text to tokens and back, for the command line."""

import pathlib
from typing import Any, Protocol


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face folder's own tokenizer.json."""

    def __init__(self, folder: pathlib.Path):
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json: save the model's tokenizer there.")
        try:
            import tokenizers
        except ImportError:
            raise ModuleNotFoundError(
                "Reading a model's tokenizer needs the extra 'hf': pip install 'jaxkv[hf]'."
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} is not a tokenizer that the tokenizers library can read: {error}") from None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


class TextStream:
    """Text that grows token by token behind a prompt: what each token adds, once it is certain.

    The prompt's tokens are decoded with the others, for many tokenizers drop the space before a text's first word.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self.text = tokenizer.decode(self._tokens)

    def add(self, token: int) -> str:
        """The text that the token completes; a character may take several tokens."""
        self._tokens.append(token)
        return self._grow(self._tokenizer.decode(self._tokens).rstrip("\ufffd"))

    def finish(self) -> str:
        """What is left."""
        return self._grow(self._tokenizer.decode(self._tokens))

    def _grow(self, text: str) -> str:
        added, self.text = text[len(self.text) :], max(self.text, text, key=len)
        return added
