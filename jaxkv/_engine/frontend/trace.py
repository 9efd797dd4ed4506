"""A trace of the contents of a cache's blocks, step by step, and a player for it."""

import contextlib
import html
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv._core.cache.block_map_html import (
    FREE,
    KEPT,
    MOST_BLOCKS,
    PALETTE,
    RESERVED,
    Square,
    group_title,
    list_squares,
)
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.head_rows import row_tables
from jaxkv._engine.frontend.engine import Engine
from jaxkv._engine.runner.engine_core import EngineCore
from jaxkv._files.paths import read_file_path
from jaxkv._tiers.host_blocks import HostBlocks

EIGHTHS = "▁▂▃▄▅▆▇█"
PLAYER = pathlib.Path(__file__).parents[2] / "data" / "player.html"


class Frame(NamedTuple):
    """The state of a cache at one time."""

    groups: tuple[tuple[Square, ...], ...]  # the blocks of each group of layers
    lengths: tuple[int, ...]  # tokens of each row
    requests: dict[int, int]  # row -> the number of the request in it
    on_host: dict[int, int]  # request -> tokens that were moved to host memory
    note: str


class Trace:
    """The contents of a cache's blocks, frame by frame. Made by `record`, or by hand with `add`.

    A notebook shows it as a player: a map of the blocks, and blocks in use over time, without a server or downloads.

    Fields:
      config: the cache's config.
      frames: one for each `add`.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=1, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes))
    >>> trace = Trace(cache.config)
    >>> cache = trace.add(jaxkv.extend(cache, [40, 0]), "a prompt")
    >>> cache = trace.add(jaxkv.fork(cache, 0, 1), "a fork of it")
    >>> trace.blocks_in_use.tolist(), trace.tokens.tolist()
    ([3, 4], [40, 80])
    """

    def __init__(self, config: CacheConfig):
        self.config = config
        self.frames: list[Frame] = []

    def add(
        self,
        cache: Cache,
        note: str = "",
        *,
        requests: Mapping[int, int] | None = None,
        on_host: Mapping[int, int] | None = None,
    ) -> Cache:
        """Adds a frame, which waits for the cache to be computed. Returns the cache.

        Args:
          note: text that the player shows beside the frame.
          requests: row -> the number of the request in it.
          on_host: that number -> tokens in host memory, for requests that are swapped out.
        """
        tables = jax.device_get(cache.tables)
        groups = tuple(
            tuple(list_squares(group_tables, self.config, group)) for group, group_tables in enumerate(tables)
        )
        lengths = tuple(row_tables(tables[0], self.config).lengths.tolist())
        self.frames.append(Frame(groups, lengths, dict(requests or {}), dict(on_host or {}), note))
        return cache

    @property
    def blocks_in_use(self) -> np.ndarray:
        """`i64[frames]`: blocks that rows hold, in all groups of layers."""
        return np.array([sum(bool(s.rows) for group in f.groups for s in group) for f in self.frames], np.int64)

    @property
    def tokens(self) -> np.ndarray:
        """`i64[frames]`: tokens of all rows."""
        return np.array([sum(f.lengths) for f in self.frames], np.int64)

    @property
    def bytes_in_use(self) -> np.ndarray:
        """`i64[frames]`: bytes of the blocks that rows hold."""
        sizes = [self.config.bytes_per_group_block(g) for g in range(len(self.config.groups))]
        used = [[sum(bool(s.rows) for s in group) for group in f.groups] for f in self.frames]
        return np.asarray(used, np.int64).reshape(len(used), len(sizes)) @ np.array(sizes, np.int64)

    def owners(self, group: int = 0) -> np.ndarray:
        """Returns `i64[frames, blocks]`: the row of each block; -1: free, -2: kept for reuse, -3: several rows."""

        def owner(s: Square) -> int:
            return (s.rows[0] if len(s.rows) == 1 else -3) if s.rows else -2 if s.kept else -1

        return np.array([[owner(s) for s in f.groups[group]] for f in self.frames], np.int64)

    def text(self, frame: int = -1, group: int = 0) -> str:
        """Returns a picture of one frame for a terminal: a line for each row, a column for each block, how full it is.

        >>> import jaxkv
        >>> sizes = dict(num_layers=1, num_kv_heads=1, head_dim=8, max_seqs=2, max_seq_len=64, block_size=16)
        >>> trace = Trace(jaxkv.CacheConfig.uniform(**sizes))
        >>> cache = trace.add(jaxkv.extend(jaxkv.init(trace.config), [40, 20]))
        >>> print(trace.text())
        row 0, 40 tokens  █ █ ▄ · · · · ·
        row 1, 20 tokens  · · · █ ▂ · · ·
        """
        shown, size = self.frames[frame], self.config.block_size
        names = [f"row {row}, {count} tokens" for row, count in enumerate(shown.lengths)]

        def mark(square: Square, row: int) -> str:
            return EIGHTHS[-(-square.filled * 8 // size) - 1] if row in square.rows and square.filled else "·"

        lines = (" ".join(mark(square, row) for square in shown.groups[group]) for row in range(len(names)))
        return "\n".join(f"{name:{max(map(len, names))}}  {line}" for name, line in zip(names, lines, strict=True))

    def html(self, path: str | os.PathLike | None = None) -> str:
        """Returns a page that plays the trace in any browser; also written to `path`, if given.

        Each frame is one step. Colours are rows; a number counts the rows that share a block; gold blocks are kept for
        reuse; dashed blocks were just freed. Hover over a block to read its contents.
        """
        # "</" in a note must not end the script.
        page = PLAYER.read_text(encoding="utf-8").replace(
            "/*TRACE*/null", json.dumps(self._data()).replace("</", "<\\/")
        )
        if path is not None:
            read_file_path("path", path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        height = 190 + 22 * sum(-(-min(n, MOST_BLOCKS) // 32) + 1 for n in self.config.group_blocks)
        page = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:{height}px;border:0"></iframe>'

    def __repr__(self) -> str:
        return f"Trace({len(self.frames)} frames, {max(self.blocks_in_use, default=0)} blocks in use at the most)"

    def _data(self) -> dict[str, Any]:
        """Returns the player's data: block contents are numbered, since most stay unchanged."""
        states: dict[Square, int] = {}

        def number(s: Square) -> int:
            return states.setdefault(s._replace(block=0), len(states))

        frames = [
            {
                "blocks": [[number(s) for s in group[:MOST_BLOCKS]] for group in f.groups],
                "used": [sum(bool(s.rows) for s in group) for group in f.groups],
                "rows": [[row, n, f.requests.get(row)] for row, n in enumerate(f.lengths) if n],
                "host": [*f.on_host.items()],
                "note": f.note,
            }
            for f in self.frames
        ]
        return {
            "states": [[s.rows, s.filled, s.first, s.kept] for s in states],
            "frames": frames,
            "groups": [group_title(self.config, g) for g in range(len(self.config.groups))],
            "sizes": list(self.config.group_blocks),
            "blockSize": self.config.block_size,
            "colours": {"rows": PALETTE, "free": FREE, "reserved": RESERVED, "kept": KEPT},
        }


@contextlib.contextmanager
def record(engine: Engine) -> Iterator[Trace]:
    """Records a `Trace` of an engine's cache: one frame for each step, while the context lasts.

    Each frame waits for its step, so a recorded engine is slower.

    >>> import jaxkv
    >>> engine = jaxkv.Engine(jaxkv.models.small(), max_seqs=2, max_seq_len=64)
    >>> with jaxkv.testing.record(engine) as trace:
    ...     outputs = [*engine.stream([list(b"import "), list(b"def ")], max_new_tokens=4)]
    >>> len(trace.frames) >= 4, int(trace.blocks_in_use.max())
    (True, 2)
    """
    trace, core = Trace(engine.config), engine._core
    if not isinstance(core, EngineCore):
        raise ValueError("record looks at one cache, but this engine's rows are divided: record one of one device.")
    advance = core.advance

    def advance_and_look() -> None:
        advance()
        scheduler = core.scheduler
        requests = {s.row: s.request.number for s in scheduler.running if s.row is not None}
        on_host = {s.request.number: s.host.num_tokens for s in scheduler.waiting if isinstance(s.host, HostBlocks)}
        trace.add(engine.cache, requests=requests, on_host=on_host)

    setattr(core, "advance", advance_and_look)  # noqa: B010 (a method cannot be assigned to otherwise)
    try:
        yield trace
    finally:
        delattr(core, "advance")
