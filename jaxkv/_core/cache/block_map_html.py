"""The HTML display of a cache in a notebook: a map of its blocks, coloured by row."""

import html
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.state.columns import blocks_of
from jaxkv._core.state.head_rows import list_blocks, row_tables
from jaxkv._core.state.state import BlockTables

MOST_BLOCKS = 4096  # maximum number of squares drawn
COLUMNS, SIZE = 32, 20  # squares per line of the map, and pixels of a square
MANY_BLOCKS = 512  # from here on, twice as many squares to a line, half as wide, and without numbers
PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f", "#86bcb6")
# Seen on a light page and on a dark one, as is text, which has the page's own colour.
FREE, RESERVED, KEPT = "rgba(128,128,128,.2)", "rgba(128,128,128,.6)", "#cfb53b"


class Square(NamedTuple):
    """The facts drawn about one block."""

    block: int
    rows: tuple[int, ...]  # rows that hold the block
    filled: int  # slots with tokens of any of these rows
    first: int  # the position of its first token
    kept: int  # label of the prefix that the block is kept for, or 0

    def text(self, block_size: int) -> str:
        """Returns the text shown on hovering."""
        kept = f"kept for reuse, prefix {self.kept}" if self.kept else ""
        if not self.rows:
            return f"block {self.block}: {kept or 'free'}"
        several = len(self.rows) > 1
        facts = [
            f"row{'s' * several} {', '.join(map(str, self.rows))}",
            f"{self.filled} of {block_size} tokens",
            f"positions {self.first} to {self.first + self.filled - 1}" if self.filled else "reserved",
            f"shared by {len(self.rows)}" if several else "",
            kept,
        ]
        return f"block {self.block}: {', '.join(fact for fact in facts if fact)}"


def list_squares(tables: BlockTables, config: CacheConfig, group: int) -> list[Square]:
    """Returns a group's blocks in order; its tables must be on the host."""
    owners: dict[int, list[tuple[int, int, int]]] = {}  # block -> rows, tokens in the block, first position
    block_size, rows, sink_blocks = config.block_size, config.max_seqs, config.group_sink_blocks[group]
    for line, column in zip(*np.nonzero(tables.tables), strict=True):
        skipped = None if tables.skipped is None else tables.skipped[line]
        first = int(blocks_of(column, skipped, sink_blocks)) * block_size
        tokens = int(np.clip(tables.lengths[line] - first, 0, block_size))
        owners.setdefault(int(tables.tables[line, column]), []).append((int(line) % rows, tokens, first))
    found = []
    for block in list_blocks(tables).tolist():
        holders = owners.get(block, [])
        filled = max((tokens for _, tokens, _ in holders), default=0)
        first = holders[0][2] if holders else 0
        found.append(Square(block, tuple(row for row, *_ in holders), filled, first, int(tables.kept[block])))
    return found


def group_title(config: CacheConfig, group: int) -> str:
    """Returns a title for the layers of a group; "" if there is one group."""
    count, seen = len(config.groups[group]), config.layers[config.groups[group][0]].retention
    return "" if len(config.groups) == 1 else f"{count} layer{'s' * (count > 1)} {seen}"


def block_map(title: str, tables: Sequence[BlockTables], config: CacheConfig) -> str:
    """Returns HTML with a square per block, filled by its share of tokens; shared blocks show a frame and row count."""
    groups = jax.device_get(tuple(tables))
    maps = [
        f'<div style="margin:4px 0 2px">{group_title(config, group)}</div>{_group_map(group_tables, config, group)}'
        for group, group_tables in enumerate(groups)
    ]
    group_tables = row_tables(groups[0], config)
    rows = [r for r in range(len(group_tables.lengths)) if group_tables.lengths[r] or group_tables.failed[r]]
    legend = "".join(
        f'<span style="margin-right:1em;white-space:nowrap">{_swatch(choose_colour(r))} row {r}: '
        f"{group_tables.lengths[r]} tokens"
        f"{', failed' if group_tables.failed[r] else ''}</span>"
        for r in rows[:64]
    )
    if any(group_tables.kept.any() for group_tables in groups):
        legend += f'<span style="margin-right:1em;white-space:nowrap">{_swatch(KEPT)} kept for reuse</span>'
    return (
        f'<div style="font:12px sans-serif;max-width:{COLUMNS * (SIZE + 2)}px">'
        f'<div style="margin-bottom:4px">{html.escape(title)}</div>{"".join(maps)}'
        f'<div style="margin-top:4px">{legend}<span style="white-space:nowrap">{_swatch(FREE)} free</span></div></div>'
    )


def choose_colour(row: int) -> str:
    return PALETTE[row % len(PALETTE)]


def _group_map(tables: BlockTables, config: CacheConfig, group: int) -> str:
    found = list_squares(tables, config, group)
    shrunk = 1 if len(found) <= MANY_BLOCKS else 2
    size, gap = SIZE // shrunk, 2 // shrunk
    drawn = "".join(_square(square, config.block_size, size) for square in found[:MOST_BLOCKS])
    hidden = len(found) - MOST_BLOCKS
    more = f"<div>… and {hidden} more blocks</div>" if hidden > 0 else ""
    columns = min(COLUMNS * shrunk, len(found))
    grid = f"display:grid;grid-template-columns:repeat({columns},{size}px);grid-auto-rows:{size}px;gap:{gap}px"
    return f'<div style="{grid};font:bold 11px/{size}px sans-serif;text-align:center">{drawn}</div>{more}'


def _square(square: Square, block_size: int, size: int) -> str:
    title, rows = square.text(block_size), square.rows
    if not rows:
        return f'<div title="{title}" style="background:{KEPT if square.kept else FREE}"></div>'
    if len(rows) == 1 and square.filled == block_size:
        return f'<div title="{title}" style="background:{choose_colour(rows[0])}"></div>'
    # One colour band per owner, from the left; the unfilled share is grey, at the top.
    share = 100 / len(rows)
    bands = ",".join(f"{choose_colour(row)} {i * share:.0f}% {(i + 1) * share:.0f}%" for i, row in enumerate(rows))
    empty = 100 - round(100 * square.filled / block_size)
    background = f"linear-gradient({RESERVED} {empty}%,transparent {empty}%),linear-gradient(to right,{bands})"
    line = size // 10
    frame = f"box-sizing:border-box;border:{line}px solid;line-height:{size - 2 * line}px;" if len(rows) > 1 else ""
    count = len(rows) if len(rows) > 1 and size == SIZE else ""
    return f'<div title="{title}" style="{frame}background:{background}">{count}</div>'


def _swatch(colour: str) -> str:
    return f'<span style="display:inline-block;width:12px;height:12px;background:{colour}"></span>'
