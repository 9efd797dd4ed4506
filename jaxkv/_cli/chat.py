"""`python -m jaxkv chat`: talks with a model. Each turn is the whole conversation, of which the prefix cache knows all
but the last question."""

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jaxkv
from jaxkv._cli.compiling import announce, keep_compiled
from jaxkv._cli.option_names import name_options
from jaxkv._cli.text import TextModel, describe_limit, is_cut, open_model, penalty_options, prefix_options

MOST_LENGTH = 8192  # default tokens of a chat
PROMPT = "> "


@keep_compiled()
def chat(arguments: argparse.Namespace) -> int:
    """Answers what is typed, line by line, until the input ends."""
    opened = open_model(arguments)
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    opened.chat.chat([*system, {"role": "user", "content": "?"}])  # what is wrong with the template is said at once
    length = min(opened.model.max_seq_len, MOST_LENGTH) if arguments.max_seq_len is None else arguments.max_seq_len
    with jaxkv.Engine(
        opened.model,
        max_seqs=1,
        max_seq_len=length,
        block_size=arguments.block_size,
        cache_dtype=arguments.cache_dtype,
        residual_length=arguments.residual_length,
        **penalty_options(opened.penalties),
        **{"prefix_cache": True} | prefix_options(arguments),
    ) as engine:
        conversation = Conversation(engine, opened, system, arguments.max_new_tokens, arguments.options)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # bytes that are no text do not end the chat
        try:
            while (line := _read_line()) is not None:
                if line.strip():
                    conversation.ask(line)
        finally:
            if arguments.prefix_disk is not None:
                engine.prefix.flush(engine.cache)
        print(conversation.describe(), file=sys.stderr)
    return 0


class Conversation:
    """The messages so far, and the engine that goes on with them. `options`: of the command, which errors name."""

    def __init__(
        self,
        engine: Any,
        opened: TextModel,
        system: list[dict[str, str]],
        max_new_tokens: int,
        options: Mapping[str, str],
    ):
        self.engine, self.opened, self.messages = engine, opened, list(system)
        self.max_new_tokens, self.options, self.turns, self.tokens = max_new_tokens, options, 0, 0

    def ask(self, question: str) -> None:
        """Prints the answer to a question as it comes. An interrupt ends it; what had come is kept."""
        messages = [*self.messages, {"role": "user", "content": question}]
        answer: list[str] = []
        cut = None
        try:
            with _Interrupt() as interrupt:
                cut = self._answer(messages, answer, interrupt)
        except KeyboardInterrupt:
            pass
        except ValueError as error:
            print(f"jaxkv: {name_options(str(error), self.options)}", file=sys.stderr)
            return
        print(flush=True)
        if cut is not None:
            print(f"jaxkv: {cut}.", file=sys.stderr)
        if answer:
            self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def _answer(self, messages: list[dict[str, str]], answer: list[str], interrupt: "_Interrupt") -> str | None:
        """Prints an answer's text. Returns why it was cut, if the chat is full."""
        tokens = self.opened.chat.chat(messages)
        if why := self.engine.problem(tokens, self.max_new_tokens):
            raise ValueError(f"The chat cannot go on: {why}, or begin another.")
        self.turns, self.tokens = self.turns + 1, self.tokens + len(tokens)
        pieces = self.opened.chat.stream(tokens)
        stream = self.engine.stream([tokens], self.max_new_tokens, eos=self.opened.eos, **self.opened.sampling)
        output: list[int] = []
        with contextlib.closing(stream):
            for _, token in announce(stream) if self.turns == 1 else stream:
                output.append(token)
                _say(pieces.add(token), answer)
                if interrupt.came:
                    print(" ...", end="")
                    return None
        _say(pieces.finish(), answer)
        if is_cut(self.engine, tokens, output, self.max_new_tokens):
            plural, limit = "s" * (len(output) != 1), describe_limit(self.engine, self.opened)
            return f"stopped after {len(output)} token{plural}: {limit}"
        return None

    def describe(self) -> str:
        saved = self.engine.stats()["tokens_saved"]
        turns = f"{self.turns} turn{'s' * (self.turns != 1)}"
        return f"jaxkv: {turns}; {saved} of the prompts' {self.tokens} tokens were known from before."


class _Interrupt:
    """Notes the first Ctrl-C instead of raising it, for Python loses one that falls into a callback. A second one is
    raised, should a step take too long.

    Fields:
      came: whether there was one.
    """

    def __init__(self):
        self.came = False
        self._before: Any = None

    def __enter__(self) -> "_Interrupt":
        with contextlib.suppress(ValueError):  # not in the main thread, where none comes
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


def _say(piece: str, answer: list[str]) -> None:
    if piece:
        print(piece, end="", flush=True)
        answer.append(piece)


def _read_line() -> str | None:
    """Returns the next line of the input; None at its end. An interrupt there begins the line anew."""
    while True:
        try:
            if sys.stdin.isatty():
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401
                return input(PROMPT)
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(The end of the input, Ctrl-D, ends the chat.)", file=sys.stderr)
