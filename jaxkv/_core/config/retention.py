"""What a layer keeps of a row: which earlier tokens the next one attends to, and which blocks stay for it.

A new rule is a class here, an option of `LayerConfig`, and a line of `make_retention`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Options of attention that layers refuse which evict: by a token's position, and by its head or row.
REFUSED_BY_POSITION, REFUSED_BY_HEAD = ("window", "sink_tokens", "alibi", "mask", "tokens"), ("sinks", "blocks")


@dataclasses.dataclass(frozen=True)
class Full:
    """Keeps all tokens."""

    @property
    def visible_tokens(self) -> int | None:
        """Maximum number of positions that a token attends to, sink tokens not counted; None: all."""
        return None

    @property
    def evict(self) -> str | None:
        """Who chooses the tokens that go: "layer" or "head" by `jaxkv.evict`; None: their positions do."""
        return None

    @property
    def refused_options(self) -> tuple[str, ...]:
        """Names the options of attention that such a layer cannot take."""
        return ()

    @property
    def kept(self) -> str:
        """Names what stays of a row, as a sentence says it of layers "that keep" it."""
        return "all tokens"

    def __str__(self) -> str:
        return "without a window"

    def first_visible_position(self, length: Any) -> Any:
        """Returns the first position that the next token of a row of `length` tokens (int or array) attends to, behind
        sink tokens; at most the row's last position, whose block determines the next block's column."""
        return _clip_below(length * 0)

    def first_retained_block(self, length: Any, block_size: int) -> Any:
        """Returns the first block that stays for the next token of a row of `length` tokens, behind sink blocks."""
        return self.first_visible_position(length) // block_size

    def sink_blocks(self, block_size: int) -> int:
        """Returns the number of leading blocks of a row that stay, whatever its length."""
        return 0

    def slide_blocks(self, block_size: int) -> int:
        """Returns the number of blocks that a row slides by in its table."""
        return 1

    def slide_columns(self, block_size: int) -> int:
        """Returns the columns, besides those of a row's visible blocks, of a table along which rows slide."""
        return self.sink_blocks(block_size) + self.slide_blocks(block_size) - 1

    def row_slots(self, block_size: int) -> int | None:
        """Returns the maximum slots in the blocks that a row holds between steps, without sink blocks; None: all."""
        if self.visible_tokens is None:
            return None
        # All visible tokens but the next one, `block_size - 1` more slots in the first block, and as many in the last.
        return max(self.visible_tokens, 2) + 2 * block_size - 3

    def num_tables(self, num_kv_heads: int) -> int:
        """Returns the number of tables of a row."""
        return 1

    def reader_refusal(self, reader: "Full") -> str | None:
        """Returns why no layer with the retention `reader` can read this layer's keys and values, as a clause; None: it
        can."""
        return None

    def mask_options(self, layer: int, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of one call of attention with this layer's mask. Raises ValueError if they exceed it."""
        return options


@dataclasses.dataclass(frozen=True)
class OneBlock(Full):
    """Keeps all tokens of a row in one block of its own, whatever the layers see (`layout="contiguous"`)."""

    def __str__(self) -> str:
        return "whole"


@dataclasses.dataclass(frozen=True)
class Window(Full):
    """Keeps the last `window` tokens, and the first `sink_tokens`."""

    window: int
    sink_tokens: int | None = None

    @property
    def visible_tokens(self) -> int:
        return self.window

    @property
    def kept(self) -> str:
        sinks = "" if self.sink_tokens is None else f" and {self.sink_tokens} sink"
        return f"a window of {self.window}{sinks} tokens"

    def __str__(self) -> str:
        sinks = "" if self.sink_tokens is None else f" and {self.sink_tokens} sink tokens"
        return f"with a window of {self.window}{sinks}"

    def first_visible_position(self, length: Any) -> Any:
        return _clip_below(length - max(self.window, 2) + 1)

    def sink_blocks(self, block_size: int) -> int:
        return -(-(self.sink_tokens or 0) // block_size)

    def reader_refusal(self, reader: Full) -> str | None:
        if isinstance(reader, Chunk):
            return f"{self}, and cannot be a layer {reader}"
        window, sink_tokens = (reader.window, reader.sink_tokens) if isinstance(reader, Window) else (None, None)
        if window is None or window > self.window:
            return f"which keeps a window of {self.window} tokens: its own window cannot be {window}"
        if (sink_tokens or 0) > (self.sink_tokens or 0):
            kept = self.sink_tokens or "no"
            return f"which keeps {kept} sink tokens: its own sink_tokens cannot be {sink_tokens}"
        return None

    def mask_options(self, layer: int, options: dict[str, Any]) -> dict[str, Any]:
        asked = options.get("window")
        if asked is not None and asked > self.window:
            raise ValueError(
                f"window={asked} is wider than what layer {layer} keeps, a window of {self.window} tokens: give its "
                "LayerConfig the wider one."
            )
        if options.get("sink_tokens", 0) > (self.sink_tokens or 0):
            kept = "sink tokens too" if self.sink_tokens is None else f"except {self.sink_tokens} sink tokens"
            raise ValueError(
                f"Layer {layer} frees the tokens that leave its window of {self.window}, {kept}, and cannot "
                f"take sink_tokens={options['sink_tokens']}: give its LayerConfig as many, or make it without a "
                "window, and give window= with them."
            )
        own = {"window": self.window, "sink_tokens": self.sink_tokens}
        return {name: value for name, value in own.items() if value is not None} | options


@dataclasses.dataclass(frozen=True)
class Chunk(Full):
    """Keeps the tokens of the next token's chunk."""

    chunk: int

    @property
    def visible_tokens(self) -> int:
        return self.chunk

    @property
    def kept(self) -> str:
        return f"chunks of {self.chunk} tokens"

    def __str__(self) -> str:
        return f"with chunks of {self.chunk}"

    def first_visible_position(self, length: Any) -> Any:
        maths = _maths(length)
        return _clip_below(maths.minimum(length // self.chunk * self.chunk, length - 1))

    def slide_blocks(self, block_size: int) -> int:  # whole chunks, so that chunk boundaries stay in place
        return math.lcm(self.chunk, block_size) // block_size

    def reader_refusal(self, reader: Full) -> str | None:
        return None if reader == self else f"{self}, and cannot be a layer {reader}"

    def mask_options(self, layer: int, options: dict[str, Any]) -> dict[str, Any]:
        if (asked := options.get("window")) is not None:
            raise ValueError(
                f"Layer {layer} sees chunks of {self.chunk} tokens, and cannot take window={asked}: leave it out."
            )
        return options | {"chunk": self.chunk}


@dataclasses.dataclass(frozen=True)
class Evicted(Full):
    """Keeps what `jaxkv.evict` leaves, for the whole layer or head by head."""

    by: str

    @property
    def evict(self) -> str:
        return self.by

    @property
    def refused_options(self) -> tuple[str, ...]:  # a token's slot is not its position; with "head", each head has own
        return REFUSED_BY_POSITION + REFUSED_BY_HEAD if self.by == "head" else REFUSED_BY_POSITION

    @property
    def kept(self) -> str:
        return f'what evict="{self.by}" leaves'

    def __str__(self) -> str:
        return f'with evict="{self.by}"'

    def num_tables(self, num_kv_heads: int) -> int:
        return num_kv_heads if self.by == "head" else 1

    def reader_refusal(self, reader: Full) -> str | None:
        if reader.visible_tokens is None:
            return None
        return f"which has evict={self.by!r}: it cannot be a layer {reader}, for slots there are not positions"


@dataclasses.dataclass(frozen=True)
class State(Full):
    """Keeps arrays of a fixed size, which take in every token, and no tokens."""

    names: tuple[str, ...]

    @property
    def kept(self) -> str:
        return f"a state ({', '.join(self.names)})"

    def __str__(self) -> str:
        return f"with a state ({', '.join(self.names)})"


def make_retention(window: int | None, sink_tokens: int | None, chunk: int | None, evict: str | None) -> Full:
    """Makes what the options of a `LayerConfig` say. Raises ValueError if they do not go together."""
    if chunk is not None and window is not None:
        raise ValueError(
            f"LayerConfig.chunk={chunk} and window={window} cannot both limit what a token sees: leave one out."
        )
    if sink_tokens is not None and window is None:
        raise ValueError(
            f"LayerConfig.sink_tokens={sink_tokens} are seen beside a window, and there is none: give window, or leave "
            "them out."
        )
    sees = Window(window, sink_tokens) if window is not None else Full() if chunk is None else Chunk(chunk)
    if evict is None:
        return sees
    if sees != Full():
        raise ValueError(
            f"A layer {sees} frees tokens by their positions, and cannot have evict={evict!r} too: leave one out."
        )
    return Evicted(evict)


def _maths(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np  # host arrays stay on the host


def _clip_below(position: Any) -> Any:
    return _maths(position).maximum(position, 0)
