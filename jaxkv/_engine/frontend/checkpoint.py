"""Saves a running engine to a file, to go on in another process, and in a cache of another size.

The file is that of a saved cache (see `_files/format`), checked and replaced in the same way; its metadata holds the
requests. Saved rows need not be computed again; all other state follows from the requests.
"""

import copy
import functools
import os
from typing import Any

from jaxkv._core.config.validation import integer
from jaxkv._core.state.errors import CacheFileError
from jaxkv._core.state.interrupts import Numbers
from jaxkv._engine.frontend.lifetime import Closable
from jaxkv._engine.requests.entries import read_request, render_request
from jaxkv._engine.requests.hook_args import HookArgs
from jaxkv._engine.requests.request import Request
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._engine.requests.stops import TextStops, TokenizerLike, check_tokenizer
from jaxkv._engine.runner.engine_core import make_sequence
from jaxkv._tiers.saved_rows import SavedRows

KEY, VERSION = "engine", 1


class Resumable(Closable):
    """An engine's `save` and `load`."""

    def save(self, path: str | os.PathLike) -> None:
        """Writes all requests, and the rows of the running ones, to a file for `load` in another process.

        Call it between steps. The file is replaced atomically: a crash on the way leaves the old one.

        Raises:
          ValueError: a cache that cannot be saved. RuntimeError: another thread is using the engine.

        >>> import jaxkv, tempfile
        >>> path, model = f"{tempfile.mkdtemp()}/engine.safetensors", jaxkv.models.small()
        >>> engine = jaxkv.Engine(model, max_seqs=2, max_seq_len=64)
        >>> request = engine.submit(list(b"import "), max_new_tokens=4)
        >>> engine.save(path)
        >>> (other,) = jaxkv.Engine(model, max_seqs=1, max_seq_len=32).load(path)
        >>> other.number == request.number, other.prompt == request.prompt
        (True, True)
        """
        with self._exclusive():
            if self._cores[0].cache_manager.eviction is not None:
                raise ValueError(
                    "Engine.save takes no engine with evict= yet, for the queries that scores ask for would have to be "
                    "saved, too: let it end its requests first."
                )
            self._core.settle()
            # Of several cores, one behind the other.
            running = [(i, s) for i, core in enumerate(self._cores) for s in core.scheduler.running if s.cached]
            number = self._cores[0].cache_manager.config.max_seqs
            rows = {s: i * number + s.row for i, s in running if s.row is not None}
            places = {sequence: place for place, sequence in enumerate(rows)}
            open_ = {request.origin: s for core in self._cores for request, s in core.open.items()}
            if len(self._cores) > 1:
                open_ = dict(sorted(open_.items(), key=lambda item: item[0].number))  # in the order of submission
            leaders = {f.request.origin: r.number for r, s in open_.items() for f in s.followers}
            told = [r for r in self._reader.news if r not in open_ and r.has_news]
            entries = [self._render(r, None, None) for r in told]
            entries += [self._render(r, places.get(s), leaders.get(r)) for r, s in open_.items()]
            state = {"version": VERSION, "next": self._reader.numbers.next, "requests": entries}
            self._core.save(path, list(rows.values()), self._model, {KEY: state})

    def load(self, path: str | os.PathLike, *, tokenizer: TokenizerLike | None = None) -> list[Request]:
        """Resumes the requests that `save` of an engine wrote, with the same tokens.

        The model must be the saved engine's, on any devices, and so must a hook; sizes and other options may differ.
        Rows are loaded as there is room; rows that do not fit in blocks of this cache are computed again.

        Args:
          tokenizer: that of the requests that were submitted with one.

        Returns:
          The requests that are not done, and those with tokens that were not yielded, in the order of submission;
          each sample is a request. `step` and `run` yield their next tokens.

        Raises:
          FileNotFoundError: no such file. DamagedFile: the file was truncated or changed. CacheFileError: it is of
          another model or no engine's, or its requests do not fit. All but the first are ValueErrors.
          ValueError: this engine has requests that are not done; a saved one needs a tokenizer. The engine is unchanged
          then.
        """
        check_tokenizer(tokenizer)
        with self._exclusive():
            if self._core.is_busy:
                raise ValueError("load is for an engine without requests: let its own end first, or make another one.")
            file = SavedRows(path)
            if KEY not in file.saved.metadata:
                raise CacheFileError(f"{path} is a saved cache, but not of an engine: Engine.save writes those.")
            if file.saved.model != self._model:
                file.check_layers(self.config)  # for the same model in another dtype the error says so
                raise CacheFileError(
                    f"{path} is of an engine with another model, whose keys, values and tokens mean nothing to this "
                    "one: load it with the model that it was saved with."
                )
            file.check_layers(self.config)
            hook_args = copy.copy(self._reader.hook_args)  # refused ones fix the form of none
            try:
                first, requests, sequences = self._read(file, file.saved.metadata[KEY], tokenizer, hook_args)
            except (TypeError, KeyError, AttributeError, IndexError, OverflowError, _Wrong) as error:
                raise CacheFileError(
                    f"{path} holds requests that this version of jaxkv cannot read ({error}): load it with the version "
                    "that saved it."
                ) from error
            for request in requests:
                if why := self._problem(request):
                    raise CacheFileError(f"Request {request.number} of {path} cannot go on here: {why}.")
            self._reader.hook_args.form = hook_args.form
            self._core.adopt(sequences)
            self._reader.news |= dict.fromkeys(requests)
            self._reader.numbers = Numbers(max(first, self._reader.numbers.next))
            return requests

    def _read(
        self, file: SavedRows, state: dict[str, Any], tokenizer: TokenizerLike | None, hook_args: HookArgs
    ) -> tuple[int, list[Request], list[Sequence]]:
        if state["version"] != VERSION:
            raise _Wrong(f"they are in version {state['version']}")
        if tokenizer is None and (wanting := [e["number"] for e in state["requests"] if "stop_strings" in e]):
            raise CacheFileError(
                f"Request {wanting[0]} of {file.path} was submitted with a tokenizer, which no file holds: give it "
                "again, load(path, tokenizer=)."
            )
        requests: list[Request] = []
        prompts: dict[tuple[int, ...], list[int]] = {}
        by_number: dict[int, Sequence] = {}
        leaders: list[tuple[Sequence, int]] = []
        try:
            for entry in state["requests"]:
                request = read_request(
                    entry,
                    hook_args,
                    tokenizer=tokenizer if "stop_strings" in entry else None,
                    read_adapter=self._reader.read_adapter,
                    news=self._reader.news,
                    engine=self._reader.engine,
                )
                request.prompt = prompts.setdefault(tuple(request.prompt), request.prompt)  # samples share one
                requests.append(request)
                request.search.text = str(entry.get("text", request.search.text))
                if request.done:
                    continue
                sequence = make_sequence(request)
                by_number[request.number] = sequence
                if (place := entry["row"]) is not None:
                    held = file.saved.lengths[integer("row", place, least=0)]
                    if not 0 < held < len(sequence.tokens):
                        raise ValueError(f"a row holds {held} tokens of {len(sequence.tokens)}")
                    sequence.host = file.row(place, self._cores[0].cache_manager.config)
                    sequence.num_hosted = held
                if entry["leader"] is not None:
                    leaders.append((sequence, entry["leader"]))
            first = integer("next", state["next"], least=0, most=None)
        except ValueError as error:
            raise _Wrong(error) from error
        heads, known = dict(by_number), {request.number for request in requests}
        for sequence, leader in leaders:
            if leader not in known:
                raise _Wrong(f"one follows {leader}, which is not there")
            head = heads.setdefault(leader, sequence)  # itself, if its leader was cancelled while it was saved
            if head is not sequence:
                head.followers.append(sequence)
                sequence.request.follow(head.request)
        if len(by_number) + sum(r.done for r in requests) != len(requests):
            raise _Wrong("two have one number")
        # Sequences with a row first: admitted ones stay ahead of waiting ones.
        return first, requests, sorted(by_number.values(), key=lambda s: s.host is None)

    def _problem(self, request: Request) -> str | None:
        if request.done:
            return None
        if request.params.hook_args is not None and not self._reader.has_hook:
            return "its hook_args are for a logits_hook, and this Engine has none: make it with logits_hook="
        length, most = len(request.prompt) + request.limit, self._reader.most_tokens
        if length > most:
            return f"it is to reach {length} tokens, and max_seq_len = {most}: raise max_seq_len"
        tokens, left = [*request.prompt, *request.output], max(request.limit - len(request.output), 1)
        return self._reader.find_problem(tokens, left)

    def _render(self, request: Request, row: int | None, leader: int | None) -> dict[str, Any]:
        entry = render_request(request, self._reader.hook_args) | {"row": row, "leader": leader}
        for texts in [stops for stops in request.search.stops if isinstance(stops, TextStops)]:
            entry |= {"text": request.text} if request.done else {"stop_strings": texts.stops}
        return entry

    @functools.cached_property  # the engine's parameters stay as they are
    def _model(self) -> str | None:
        return self._core.name_model()


class _Wrong(Exception):
    """Raised when the file does not hold an engine's state."""
