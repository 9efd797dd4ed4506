"""The config of one layer: its shape, its storage, and what it keeps of a row."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxkv._core.config.config_repr import write_fields
from jaxkv._core.config.retention import Full, State, make_retention
from jaxkv._core.config.validation import flag, integer, read_list, refuse_unknown_fields, show
from pallas_kernels.common.quantization import FORMATS, StorageFormat

STATE_DTYPES = ("float32", "bfloat16", "float16")
OPTIONAL_SIZES = ("window", "rank", "chunk", "sink_tokens", "v_head_dim", "index_dim", "compress_ratio")
# What vLLM, TensorRT-LLM and PyTorch call these formats.
ELSEWHERE = {
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "float": "float32", "i8": "int8",
}  # fmt: skip


class StateArray(NamedTuple):
    """One array of a row's state."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def read_arrays(arrays: Iterable[Any]) -> tuple[StateArray, ...]:
    """Returns the arrays of a state, checked. Raises ValueError, which names the array."""
    found = []
    for array in read_list("LayerConfig.states", arrays):
        if not isinstance(array, tuple | list) or len(array) != 3:
            raise ValueError(f"LayerConfig.states must be arrays, each (name, shape, dtype), not {show(array)}.")
        name, shape, dtype = array
        if not isinstance(shape, Iterable) or isinstance(shape, str | bytes):
            raise ValueError(f"LayerConfig.recurrent: the shape of {name} must be a list of sizes, not {show(shape)}.")
        sizes = tuple(integer(f"a size of LayerConfig.recurrent's {name}", n, least=1) for n in shape)
        if not sizes:
            raise ValueError(f"LayerConfig.recurrent: {name} must have at least one axis, such as its heads.")
        try:
            kind = jnp.dtype(dtype).name
        except Exception:  # NumPy raises errors of many types
            kind = None
        if kind not in STATE_DTYPES:
            raise ValueError(
                f"LayerConfig.recurrent: the dtype of {name} must be one of {', '.join(STATE_DTYPES)}, not "
                f"{dtype if isinstance(dtype, str) else show(dtype)}."
            )
        found.append(StateArray(name, sizes, kind))
    if not found:
        raise ValueError("LayerConfig.recurrent needs at least one array: its name, with a shape and a dtype.")
    return tuple(found)


def kind_of(dtype: Any, field: str) -> StorageFormat:
    """Returns the storage format that a dtype, or its name, means. Raises ValueError, naming the field."""
    try:
        name = jnp.dtype(dtype).name
    except Exception:  # NumPy reads dicts and lists too, and raises errors of many types for them
        name = dtype
    if not isinstance(name, str) or name not in FORMATS:
        given = dtype if isinstance(dtype, str) else show(dtype)
        meant = f": did you mean {ELSEWHERE[given]}?" if given in ELSEWHERE else "."
        raise ValueError(f"{field} must be one of {', '.join(FORMATS)}, not {given}{meant}")
    return FORMATS[name]


def count_tokens_of_entries(layers: Iterable["LayerConfig"]) -> int:
    """Returns the least number of tokens that are whole entries in all layers: blocks hold a multiple; 1 without
    `compress_ratio`."""
    return math.lcm(*(layer.compress_ratio or 1 for layer in layers))


@refuse_unknown_fields
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LayerConfig:
    """The config of one layer: an attention layer, or one that keeps a state, made by `recurrent`.

    Args:
      num_kv_heads: KV heads, K in shapes.
      head_dim: elements per head, D in shapes; of keys alone with `v_head_dim`.
      v_head_dim: elements per head of values, where they are others: 128 beside keys of 192 in DeepSeek's heads. A
        token's values and keys are then stored in one row of the pool, and outputs are as wide as values.
      window: sliding window: a token attends to the last `window` positions, its own included; None: to all. Blocks
        that no later token can attend to are freed.
      sink_tokens: with `window`, the number of leading tokens of a row that stay and that every token attends to too
        (StreamingLLM, https://arxiv.org/abs/2309.17453).
      chunk: a token attends to its own chunk only, from position `position // chunk * chunk` on (Llama 4's local
        layers). Blocks before the next token's chunk are freed. Not with `window`.
      dtype: the layer's storage format; default: the cache's.
      shares_with: index of an earlier layer whose keys and values this one reads. The layer stores none of its own.
      rank: for a latent layer, the number of leading entries of a token that are its values too; see `latent`.
      rotate: for a quantized layer, whether heads are rotated before they are stored, so that a few large channels do
        not determine the scale; see `pallas_kernels.common.rotation`. Queries and outputs are rotated to match. None:
        the storage format's default.
      evict: "layer" or "head": `jaxkv.evict` may drop tokens of a row, for the whole layer or head by head. The layer
        has its own block tables; with "head" one for each KV head, and each block holds one head. Not with `window`
        or `chunk`.
      bounds: whether every block's minimum and maximum key entries are stored beside the block and updated by every
        write, so that `block_bounds` and `jaxkv.scores.quest` can select blocks. Not with `evict="head"`.
      index_dim: entries of one more key of each token, of no head, by which queries choose the tokens that they attend
        to (DeepSeek sparse attention, https://arxiv.org/abs/2512.02556): see `write_index` and `jaxkv.scores.indexer`.
        Index keys are stored in the layer's format, in int8 if that has four bits, with one scale a token. Not with
        `evict="head"`.
      compress_ratio: the layer stores one entry for so many tokens, as DeepSeek-V4's compressed layers do
        (https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro/blob/main/DeepSeek_V4.pdf): `jaxkv.compress` stores the
        entries that a step completes, and a token sees those whose tokens lie behind it, its own included. Keys, values
        and index keys are then an entry's. Not with `window`, `chunk`, `evict`, `bounds` or `shares_with`.
      states: for a layer that keeps a state instead of keys and values, its arrays; see `recurrent`.
      is_residual: whether the layer holds the newest tokens of a quantized one. `CacheConfig` makes such layers, by its
        `residual_length`; models do not name them.

    >>> LayerConfig(num_kv_heads=2, head_dim=64).dim
    128
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: Any = None
    shares_with: int | None = None
    rank: int | None = None
    rotate: bool | None = None
    chunk: int | None = None
    evict: str | None = None
    sink_tokens: int | None = None
    bounds: bool = False
    states: tuple[StateArray, ...] | None = None
    v_head_dim: int | None = None
    index_dim: int | None = None
    compress_ratio: int | None = None
    is_residual: bool = False

    @functools.cached_property
    def retention(self) -> Full:
        """What the layer keeps of a row, and what its tokens attend to."""
        if self.states is not None:
            return State(tuple(array.name for array in self.states))
        return make_retention(self.window, self.sink_tokens, self.chunk, self.evict)

    def __post_init__(self):
        if self.states is not None:
            object.__setattr__(self, "states", read_arrays(self.states))
            self._check_recurrent()
        least_of = {"shares_with": 0} | dict.fromkeys(OPTIONAL_SIZES, 1)
        limits = {"num_kv_heads": 1, "head_dim": 1} | least_of
        for field, least in limits.items():
            value, optional = getattr(self, field), field not in ("num_kv_heads", "head_dim")
            if not (optional and value is None):
                object.__setattr__(self, field, integer(f"LayerConfig.{field}", value, least=least))
        if not (self.rotate is None or isinstance(self.rotate, bool)):
            raise ValueError(f"LayerConfig.rotate must be True, False or None, not {show(self.rotate)}.")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", kind_of(self.dtype, "LayerConfig.dtype").declared_dtype)

        if self.v_head_dim == self.head_dim:
            object.__setattr__(self, "v_head_dim", None)
        if self.v_head_dim is not None and self.rank is not None:
            raise ValueError(
                f"A latent layer's values are the first {self.rank} entries of its rows: leave v_head_dim out."
            )
        if self.evict is not None and not (isinstance(self.evict, str) and self.evict in ("layer", "head")):
            raise ValueError(f'LayerConfig.evict must be "layer", "head" or None, not {show(self.evict)}.')
        _ = self.retention  # raises if the options do not go together
        object.__setattr__(self, "bounds", flag("LayerConfig.bounds", self.bounds))
        object.__setattr__(self, "is_residual", flag("LayerConfig.is_residual", self.is_residual))
        if self.bounds and self.evict == "head":
            raise ValueError(
                'LayerConfig.bounds are of blocks that hold all heads, and with evict="head" each head has blocks of '
                'its own: choose evict="layer", or leave bounds out.'
            )
        if self.index_dim is not None and self.evict == "head":
            raise ValueError(
                'LayerConfig.index_dim is of keys that belong to no head, and with evict="head" a block holds one: '
                'choose evict="layer", or leave index_dim out.'
            )
        if self.compress_ratio == 1:
            object.__setattr__(self, "compress_ratio", None)
        if self.compress_ratio is not None:
            self._check_compressed(self.compress_ratio)
        if self.rank is not None and self.evict == "head":
            raise ValueError('A latent layer has no heads to evict by: give it evict="layer".')
        if self.rank is not None and (self.num_kv_heads != 1 or self.rank > self.head_dim):
            raise ValueError(
                f"LayerConfig.rank is for latent layers, of one head no narrower than it, but rank is {self.rank}, "
                f"num_kv_heads {self.num_kv_heads} and head_dim {self.head_dim}: make it with LayerConfig.latent."
            )

    def replace(self, **changes: Any) -> "LayerConfig":
        """Returns this config with other fields, such as a loaded model's layer with a window.

        >>> LayerConfig(num_kv_heads=2, head_dim=64).replace(window=1024, sink_tokens=4)
        LayerConfig(num_kv_heads=2, head_dim=64, window=1024, sink_tokens=4)
        """
        return dataclasses.replace(self, **changes)

    @classmethod
    def latent(cls, rank: int = 512, rope_dim: int = 64, **fields: Any) -> "LayerConfig":
        """Makes a layer that stores one latent row `[rank + rope_dim]` per token, without heads. The row's first `rank`
        entries are the values, so that a token is stored once.

        Pass absorbed queries `[.., H, rank + rope_dim]`, keys `[.., 1, rank + rope_dim]` and None as values. The
        output is `[.., H, rank]`. `attention` and `attend` require `scale=`.

        Args:
          rank: entries of a token that all heads' keys and values are made from.
          rope_dim: entries of the key that carry positions, shared by all heads; 0: keys and values are the same.
          **fields: `window`, `dtype`, `bounds`, `index_dim`, `compress_ratio` and `shares_with`.

        From DeepSeek-V2 (https://arxiv.org/abs/2405.04434).

        >>> LayerConfig.latent().head_dim
        576
        """
        rank, rope_dim = integer("rank", rank, least=1), integer("rope_dim", rope_dim, least=0)
        return cls(num_kv_heads=1, head_dim=rank + rope_dim, rank=rank, **fields)

    def __repr__(self) -> str:
        if self.states is not None:
            arrays = (f"{array.name}=({array.shape}, {array.dtype!r})" for array in self.states)
            return f"LayerConfig.recurrent({', '.join(arrays)})"
        return write_fields(self)

    @classmethod
    def recurrent(cls, **arrays: Any) -> "LayerConfig":
        """Makes a layer that keeps a state of fixed size of each row, instead of keys and values.

        `read_states` and `write_states` read and write it; `causal_conv`, `gated_delta_rule` and `state_space` do both.

        Args:
          **arrays: by name, the shape of one row's array, and its dtype: float32, bfloat16 or float16.

        Raises:
          ValueError: no array, or one that is no shape and dtype; an option of attention layers, such as `window`.

        >>> layer = LayerConfig.recurrent(conv=((64, 3), "bfloat16"), state=((4, 16, 16), "float32"))
        >>> layer.is_recurrent, layer.state_bytes
        (True, 4480)
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        for name, array in arrays.items():
            if name in fields:
                raise ValueError(
                    f"LayerConfig.recurrent keeps one state of each row and takes no {name}, which is for attention "
                    f"layers: leave {name}={show(array)} out."
                )
            if not isinstance(array, tuple | list) or len(array) != 2:
                raise ValueError(f"LayerConfig.recurrent: {name} must be (shape, dtype), not {show(array)}.")
        states = read_arrays((name, *array) for name, array in arrays.items())
        return cls(num_kv_heads=1, head_dim=1, states=states)

    def _check_recurrent(self) -> None:
        for field in dataclasses.fields(self):
            if field.name not in ("num_kv_heads", "head_dim", "states") and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"A layer that keeps a state takes no {field.name}, which is for attention layers: leave "
                    f"{field.name}={show(getattr(self, field.name))} out."
                )

    def _check_compressed(self, ratio: int) -> None:
        for name in ("window", "chunk", "evict", "shares_with", "bounds"):
            if (value := getattr(self, name)) is not None and value is not False:
                raise ValueError(
                    f"LayerConfig.compress_ratio={ratio} makes a layer of entries, which stay as long as their row, "
                    f"and does not go with {name}={value!r}: leave one out."
                )

    def mask_options(self, layer: int, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of one call of attention with what tokens see of this layer, the index of which is
        `layer`. Raises ValueError if they exceed it."""
        options = self.retention.mask_options(layer, options)
        return options if self.compress_ratio is None else options | {"compress_ratio": self.compress_ratio}

    def count_entries(self, tokens: Any) -> Any:
        """Returns how many keys the layer stores of so many first tokens of a row (int or array)."""
        return tokens if self.compress_ratio is None else tokens // self.compress_ratio

    def keeps_quantized(self, dtype: Any) -> bool:
        """Tells whether the layer stores keys and values of its own, of each token, and quantized, in a cache of
        `dtype`."""
        if self.is_recurrent or self.shares_with is not None or self.compress_ratio is not None:
            return False
        return kind_of(self.dtype or dtype, "dtype").is_quantized

    def make_residual(self, length: int) -> "LayerConfig":
        """Makes the layer that holds the newest `length` tokens of this one, in bfloat16."""
        shape = {name: getattr(self, name) for name in ("num_kv_heads", "head_dim", "v_head_dim", "rank")}
        return LayerConfig(**shape, window=length, dtype="bfloat16", is_residual=True)

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer keeps a state instead of keys and values."""
        return self.states is not None

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's state; 0 for attention layers."""
        return sum(array.bytes for array in self.states or ())

    @property
    def row_dim(self) -> int:
        """Elements of one head in a row of the pool: a key, or a value and then a key, or a latent row."""
        return self.head_dim + (self.v_head_dim or 0)

    @property
    def row_rank(self) -> int | None:
        """The leading elements of a row that are values, where one row holds values and keys; else None."""
        return self.rank or self.v_head_dim

    @property
    def value_dim(self) -> int:
        """Elements of one head's values, and of its outputs."""
        return self.row_rank or self.head_dim

    @property
    def dim(self) -> int:
        """Elements of one token's keys; its values have as many, except with `v_head_dim`, and in a latent layer,
        which stores none."""
        return self.num_kv_heads * self.head_dim
