"""What each process of an engine does for a call of the first one, by the name in its message."""

import collections
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from jaxkv._engine.programs.recompute import recompute
from jaxkv._engine.requests.entries import parse_salt
from jaxkv._engine.requests.request import Request
from jaxkv._engine.requests.sampling import Kind
from jaxkv._engine.runner.engine_core import EngineCore, make_sequence
from jaxkv._tiers.saved_rows import SavedRows

TURNS = ("advance", "tidy", "settle", "reset")  # calls that take in what was submitted, and say nothing


class OwnCores(Protocol):
    """What calls ask of a process: its `LockstepCores`."""

    core: Any
    cores: list[EngineCore]
    change: Callable[[], None] | None

    def read_entry(self, entry: dict[str, Any], origins: "collections.deque[Request]") -> Request:
        """Makes the replica of an entry."""


def take_turn(own: OwnCores, name: str) -> None:
    """Makes one of the calls in `TURNS`, and measures the room where it is unknown: `stats`, of one process, must run
    nothing on the devices of all."""
    getattr(own.core, name)()
    for core in own.cores:
        is_measured = core.cache_manager.room.is_known or core.cache_manager.config.contiguous
        if not (is_measured or core.cache_manager.is_released):
            core.cache_manager.settle()


def adopt(
    own: OwnCores, path: str | None, entries: list[dict[str, Any]], origins: "collections.deque[Request]"
) -> None:
    """Adopts sequences of another process, whose rows are in a file."""
    file, sequences = None if path is None else SavedRows(path), []
    prompts: dict[tuple[int, ...], list[int]] = {}
    for entry in entries:
        replica = own.read_entry(entry, origins)
        replica.prompt = prompts.setdefault(tuple(replica.prompt), replica.prompt)  # samples share one
        sequence = make_sequence(replica)
        if (row := entry.get("row")) is not None:
            assert file is not None
            sequence.host = file.row(row, own.cores[0].cache_manager.config)
            sequence.num_hosted = file.saved.lengths[row]
        sequences.append(sequence)
    for entry, sequence in zip(entries, sequences, strict=True):
        sequence.followers = [sequences[place] for place in entry["followers"]]
        for follower in sequence.followers:
            follower.request.follow(sequence.request)
    own.core.adopt(sequences)


def _release(own: OwnCores, keep: bool, parameters: bool) -> None:
    for core in own.cores:
        core.release(keep=keep, parameters=parameters)


def _restore(own: OwnCores) -> None:
    for core in own.cores:
        core.restore()


def _show(own: OwnCores) -> Any:
    return own.core.cache


def _save(own: OwnCores, path: str, rows: list[int], model: str | None, metadata: dict[str, Any]) -> None:
    own.core.save(path, rows, model, metadata)


def _name_model(own: OwnCores) -> str | None:
    return own.core.name_model()


def _change_pins(own: OwnCores, method: str, tokens: list[int], salt: list[str], adapter: str | None) -> Any:
    prefix = own.cores[0].cache_manager.prefix
    assert prefix is not None
    return getattr(prefix, method)(tokens, salt=parse_salt(*salt), adapter=adapter)


def _warm(own: OwnCores, kinds: Iterable[Kind], counts: Iterable[int]) -> None:
    for call in own.core.warm(tuple(kinds), tuple(counts)):
        call()


def _update(own: OwnCores) -> None:
    assert own.change is not None  # else `follow` has ended
    own.change()


def _recompute(own: OwnCores, tokens: list[int], column: list[int], kind: Kind) -> list[int]:
    runner, cache_manager = own.cores[0].runner, own.cores[0].cache_manager
    return recompute(
        runner.structure,
        runner.leaves,
        runner.hook,
        cache_manager.config.max_seq_len,
        tokens,
        np.array(column, np.int32),
        kind,
        place=cache_manager.device.shared,
    )


CALLS: dict[str, Callable[..., Any]] = {
    "show": _show, "save": _save, "name_model": _name_model, "warm": _warm, "change_pins": _change_pins,
    "release": _release, "restore": _restore, "update": _update, "recompute": _recompute,
}  # fmt: skip
