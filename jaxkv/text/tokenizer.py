"""A model's own tokenizer, and its text as tokens come."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxkv._core.config.validation import integer, show
from jaxkv._files.gguf import read_metadata
from jaxkv._files.hub import find_model
from jaxkv._files.json_file import read_json
from jaxkv.text.chat_template import ChatTemplate
from jaxkv.text.gguf_tokenizer import build_tokenizer, special_tokens

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
LONG_TEXT = 10_000  # characters: some ten milliseconds
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens of single bytes


def _list_byte_level() -> dict[str, int]:
    """Returns the bytes that characters of byte-level BPE stand for: those that cannot be seen begin at U+0100."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(others)}


OF_BYTE_LEVEL = _list_byte_level()


class Tokenizer:
    """The tokenizer of a model: a folder's tokenizer.json, and the chat template beside it; or those of a GGUF file.

    Args:
      source: the folder, the GGUF file, or a name on the Hugging Face hub, `"owner/name"`. `folder` is what it led to.

    Raises:
      FileNotFoundError: there is no such folder or file, or it has no tokenizer.json.
      ModuleNotFoundError: the extra `hf` is not installed.
      ValueError: a file that cannot be read.

    >>> text = Tokenizer("path/to/folder")  # doctest: +SKIP
    >>> ids = text.chat([{"role": "user", "content": "What is the capital of France?"}])  # doctest: +SKIP
    >>> stream = text.stream()  # doctest: +SKIP
    >>> for token in jaxkv.generate(model, [ids])[0]:  # doctest: +SKIP
    ...     print(stream.add(token), end="")
    """

    def __init__(self, source: str | os.PathLike):
        self.folder = find_model(source, weights=False)
        try:
            import tokenizers  # noqa: F401
        except ImportError:
            raise ModuleNotFoundError(
                "Reading a model's tokenizer needs the extra 'hf': pip install 'jaxkv[hf]'."
            ) from None
        files: _Files = _GGUFFile(self.folder) if self.folder.suffix == ".gguf" else _Folder(self.folder)
        self._tokenizer: Any = files.read_tokenizer()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._files = files
        self._template: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that the tokenizer says end a text; a model may know more."""
        token = self._tokenizer.token_to_id(self._files.special_tokens().get("eos_token", ""))
        return () if token is None else (token,)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the tokens of a text.

        Args:
          special: put the tokens around it that the tokenizer puts around a text, such as the one that begins it; those
            that the text begins or ends with already are not put there twice.

        Raises:
          ValueError: no text, or one with half a character (a lone surrogate).
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, not {show(text)}.")
        plain = self._encode(text, False)
        if not special:
            return plain
        whole = self._encode(text, True)
        extra = len(whole) - len(plain)
        start = next((i for i in range(extra + 1) if whole[i : i + len(plain)] == plain), None)
        if start is None:  # the tokenizer puts them elsewhere
            return whole
        before, after = whole[:start], whole[start + len(plain) :]
        before = [] if plain[: len(before)] == before else before
        after = [] if after and plain[-len(after) :] == after else after
        return before + plain + after

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # where the tokenizer would raise TypeError
            raise ValueError(
                f"The text has half a character, the lone surrogate {text[error.start]!r}: leave it out, or send the "
                "whole one."
            ) from None
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=special).ids
        # No other thread of Python runs while `encode` does, a second for each mebibyte. Batches are encoded by threads
        # of the library's own, of which there are few: short texts do not wait for them.
        return self._tokenizer.encode_batch([text], add_special_tokens=special)[0].ids

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Returns the text of tokens; with `special` also of those that stand for no text."""
        ids = [integer("token", token, least=0, most=2**32 - 1) for token in tokens]
        return self._tokenizer.decode(ids, skip_special_tokens=not special)

    def token_string(self, token: int) -> str:
        """Returns a token as the vocabulary has it, such as `"Ġthe"`: not its text. Raises ValueError."""
        number = integer("token", token, least=0, most=2**32 - 1)
        if (found := self._tokenizer.id_to_token(number)) is None:
            raise ValueError(f"The tokenizer has no token {number}, but {self.vocab_size} tokens from 0 on.")
        return found

    def token_bytes(self, token: int) -> bytes:
        """Returns a token's own bytes, of which several tokens may make a character; of special ones their name's."""
        text = self.decode([token], special=True)
        if "\ufffd" in text and (piece := self._tokenizer.id_to_token(token)) is not None:
            if found := BYTE.fullmatch(piece):
                return bytes.fromhex(found[1])
            if all(character in OF_BYTE_LEVEL for character in piece):
                return bytes(OF_BYTE_LEVEL[character] for character in piece)
        return text.encode()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Returns the tokens of a conversation, as the model's chat template writes it.

        Args:
          messages: `{"role": "user", "content": "..."}` and so on, in their order.
          add_generation_prompt: end where the model's answer begins.
          **variables: more that the template may ask for, such as `tools` or `enable_thinking`; JSON's types.

        Raises:
          ValueError: there is no template, it fails, or it takes too long or too much; or messages of another form.
        """
        return self._encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables), False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns what `chat` makes tokens of."""
        wanted = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
        if (
            not wanted
            or not messages
            or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages)
        ):
            raise ValueError(
                'messages must be a list of messages such as {"role": "user", "content": "..."}, not '
                f"{show(messages)}."
            )
        if self._template is None:
            self._template = ChatTemplate(self._find_template(), str(self.folder))
        return self._template.render(
            self._files.special_tokens()
            | variables
            | {"messages": list(map(dict, messages)), "add_generation_prompt": bool(add_generation_prompt)}
        )

    def stream(self, prompt: Iterable[int] = ()) -> "TextStream":
        """Returns what makes text of tokens one by one, behind those of a prompt."""
        return TextStream(self, list(prompt))

    @property
    def has_template(self) -> bool:
        """Tells whether there is a chat template."""
        return self._files.find_template() is not None

    def _find_template(self) -> str:
        if (found := self._files.find_template()) is not None:
            return found
        raise ValueError(
            f"{self.folder} has no chat template, {self._files.template_places}: a model without one is not made for "
            "chats. Have it continue a text: by encode in Python, generate on the command line, or /v1/completions."
        )


class _Files(Protocol):
    """Where a tokenizer, its special tokens and a chat template come from."""

    template_places: str

    def read_tokenizer(self) -> Any: ...
    def special_tokens(self) -> dict[str, str]: ...
    def find_template(self) -> str | None: ...


class _Folder:
    template_places = "in chat_template.jinja or tokenizer_config.json"

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._config = _read_config(folder / "tokenizer_config.json")

    def read_tokenizer(self) -> Any:
        import tokenizers

        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{self.folder} has no tokenizer.json: save the model's tokenizer there. Without text, "
                "jaxkv.generate(model, [[1, 2, 3]]) takes token ids."
            )
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} is not a tokenizer that the tokenizers library can read: {error}") from None

    def special_tokens(self) -> dict[str, str]:
        """The names under which templates know special tokens."""
        found = {}
        for config in (_read_config(self.folder / "special_tokens_map.json"), self._config):
            for name in SPECIAL:
                token = config.get(name)
                token = token.get("content") if isinstance(token, Mapping) else token
                if isinstance(token, str):
                    found[name] = token
        return found

    def find_template(self) -> str | None:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
        for config in (self._config, _read_config(self.folder / "chat_template.json")):
            found = config.get("chat_template")
            if isinstance(found, list):  # several, by name
                named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
                found = named.get("default", next(iter(named.values()), None))
            if isinstance(found, str):
                return found
        return None


class _GGUFFile:
    template_places = "tokenizer.chat_template"

    def __init__(self, path: pathlib.Path):
        self.path, self.metadata = path, read_metadata(path)

    def read_tokenizer(self) -> Any:
        return build_tokenizer(self.metadata, str(self.path))

    def special_tokens(self) -> dict[str, str]:
        return special_tokens(self.metadata)

    def find_template(self) -> str | None:
        found = self.metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None


class Decodes(Protocol):
    def decode(self, tokens: Iterable[int]) -> str: ...


class TextStream:
    """Text that grows token by token behind a prompt: what each token adds, once it is certain.

    The prompt's tokens are decoded with the others, for many tokenizers drop the space before a text's first word. Only
    the last few tokens are decoded again for each. `text` is all of it, the prompt's included.
    """

    KEPT = 16  # tokens that are decoded again, so that words and characters join as in the whole text

    def __init__(self, tokenizer: Decodes, prompt: list[int]):
        self._tokenizer, self._tokens = tokenizer, list(prompt)[-self.KEPT :]
        self._shown = tokenizer.decode(self._tokens).rstrip("\ufffd")
        self.text = tokenizer.decode(prompt).rstrip("\ufffd")

    def add(self, token: int) -> str:
        """Returns the text that the token completes; a character may take several tokens."""
        self._tokens.append(token)
        added = self._grow(self._tokenizer.decode(self._tokens).rstrip("\ufffd"))
        if added and len(self._tokens) > 4 * self.KEPT:
            self._forget()
        return added

    def finish(self) -> str:
        """Returns what is left, with replacement characters for one that never was complete."""
        return self._grow(self._tokenizer.decode(self._tokens))

    def _grow(self, text: str) -> str:
        if not text.startswith(self._shown):  # nothing certain yet
            return ""
        added, self._shown = text[len(self._shown) :], text
        self.text += added
        return added

    def _forget(self) -> None:
        """Drops leading tokens where the text of the others is the end of what has been shown."""
        last = self._tokens[-self.KEPT :]
        text = self._tokenizer.decode(last)
        if text and self._shown.endswith(text):
            self._tokens, self._shown = last, text


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    """Returns what a file says; nothing if there is none. Raises ValueError."""
    return read_json(path) if path.is_file() else {}
