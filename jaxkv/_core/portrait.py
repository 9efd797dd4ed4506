"""A cache's picture in a notebook: a map of its blocks, coloured by row."""

import html
from collections.abc import Sequence

import jax
import numpy as np

from jaxkv._core.config import CacheConfig
from jaxkv._core.state import BlockTables

MOST_BLOCKS = 2048  # more squares than this are not drawn
PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f", "#86bcb6")
FREE, RESERVED, KEPT = "#eceff1", "#b0bec5", "#cfb53b"


def block_map(title: str, tables: Sequence[BlockTables], config: CacheConfig) -> str:
    """HTML: one square per block, filled as far as its tokens reach; a shared block has a frame and its row count."""
    groups = jax.device_get(tuple(tables))
    maps = [_group_map(t, config.block_size) for t in groups]
    if len(groups) > 1:
        maps = [
            f'<div style="margin:4px 0 2px">{len(layers)} layer{"s" * (len(layers) > 1)} '
            f"{'without a window' if window is None else f'with a window of {window}'}</div>{squares}"
            for squares, layers, window in zip(maps, config.groups, config.group_windows, strict=True)
        ]
    t = groups[0]
    rows = [r for r in range(len(t.lengths)) if t.lengths[r] or t.failed[r]]
    legend = "".join(
        f'<span style="margin-right:1em;white-space:nowrap">{_swatch(_colour(r))} row {r}: {t.lengths[r]} tokens'
        f"{', failed' if t.failed[r] else ''}</span>"
        for r in rows[:64]
    )
    if any(t.kept.any() for t in groups):
        legend += f'<span style="margin-right:1em;white-space:nowrap">{_swatch(KEPT)} kept for reuse</span>'
    return (
        f'<div style="font:12px sans-serif;max-width:46em">'
        f'<div style="margin-bottom:4px">{html.escape(title)}</div>{"".join(maps)}'
        f'<div style="margin-top:4px">{legend}<span style="white-space:nowrap">{_swatch(FREE)} free</span></div></div>'
    )


def _group_map(t: BlockTables, block_size: int) -> str:
    owners: dict[int, list[tuple[int, int]]] = {}  # block -> the rows that hold it, and the tokens they see in it
    for row, entries in enumerate(t.tables):
        for column, block in enumerate(entries):
            if block:
                tokens = int(np.clip(t.lengths[row] - column * block_size, 0, block_size))
                owners.setdefault(int(block), []).append((row, tokens))
    num_blocks = t.free_list.shape[0]
    squares = [
        _square(block, owners.get(block, []), bool(t.kept[block]), block_size)
        for block in range(1, 1 + min(num_blocks, MOST_BLOCKS))
    ]
    hidden = num_blocks - len(squares)
    more = f"<div>… and {hidden} more blocks</div>" if hidden else ""
    return f'<div style="display:flex;flex-wrap:wrap;gap:2px">{"".join(squares)}</div>{more}'


def _square(block: int, owners: list[tuple[int, int]], kept: bool, block_size: int) -> str:
    style = "width:14px;height:14px;box-sizing:border-box;font:bold 9px/14px sans-serif;text-align:center;color:#000;"
    if not owners:
        state, colour = ("kept for reuse", KEPT) if kept else ("free", FREE)
        return f'<div title="block {block}: {state}" style="{style}background:{colour}"></div>'
    filled = max(tokens for _, tokens in owners)
    rows = ", ".join(str(row) for row, _ in owners)
    share = round(100 / len(owners))
    # One colour band per owner, from the left; what is not filled is grey, above.
    bands = ",".join(f"{_colour(row)} {i * share}% {(i + 1) * share}%" for i, (row, _) in enumerate(owners))
    empty = 100 - round(100 * filled / block_size)
    background = f"linear-gradient({RESERVED} {empty}%,transparent {empty}%),linear-gradient(to right,{bands})"
    frame, label = ("border:1.5px solid #000;line-height:11px;", len(owners)) if len(owners) > 1 else ("", "")
    title = f"block {block}: row{'s' * (len(owners) > 1)} {rows}, {filled} of {block_size} tokens{', kept' * kept}"
    return f'<div title="{title}" style="{style}{frame}background:{background}">{label}</div>'


def _colour(row: int) -> str:
    return PALETTE[row % len(PALETTE)]


def _swatch(colour: str) -> str:
    return f'<span style="display:inline-block;width:10px;height:10px;background:{colour}"></span>'
