"""The sizes of a cache: static and hashable, so that they are part of a `jit` key. All sizes are validated here."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack

import jax
from jax.sharding import Mesh

from jaxkv._core.config import layer_checks as checks
from jaxkv._core.config.block_size import HEAD_DIM_MULTIPLES, choose_block_size, kernel_platform
from jaxkv._core.config.config_repr import write_fields, write_layers
from jaxkv._core.config.fields import LayoutFields
from jaxkv._core.config.from_dense import MadeLike
from jaxkv._core.config.layer_config import LayerConfig, count_tokens_of_entries, kind_of
from jaxkv._core.config.mesh_shape import HEADS, check_mesh, find_mesh
from jaxkv._core.config.validation import MOST_INDEX, flag, integer, read_list, real, refuse_unknown_fields, show

# Share of the full layers' bytes that sliding windows get for prompts in no row. The windows then serve as many prompts
# as the full layers keep at usual lengths, and at most 1.25 times fewer tokens fit.
RETAINED_SHARE = 0.25
JOINING = ("tpu",)  # platforms whose kernels read keys and values stored in one row


class _Settled(int):
    """A size that the config derived: `dataclasses.replace` may give another."""


class _SettledBlocks(tuple[int, ...]):
    """A derived `group_blocks`."""


@refuse_unknown_fields
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CacheConfig(MadeLike):
    """The sizes of a cache.

    Args:
      layers: one `LayerConfig` per layer, attention layers and recurrent ones; they may differ. Recurrent layers have
        a slot for each row's state, whatever its length, and at least one layer is an attention layer.
      max_seqs: number of rows, the sequences held at once; S in shapes.
      max_seq_len: maximum tokens of one row; default: `max_tokens`. If every layer has a window, chunks or `evict`, a
        row may grow to 2**30 tokens, and `max_seq_len` limits what a layer holds of a row at once: the tokens that the
        next ones attend to, and the next ones. Positions keep counting up; whether a model handles positions beyond
        its training depends on its RoPE.
      num_blocks: blocks per layer. Default: `ceil(max_tokens / block_size)`.
      group_blocks: blocks per layer for each of `groups`, where they differ; `num_blocks` is then the largest. In a
        layer that evicts by heads a block belongs to one head, and there are K times as many blocks.
      max_tokens: maximum tokens of all rows together; default: `num_blocks * block_size`.
      block_size: tokens per block; always `max_seq_len` if contiguous. Default: the size that the platform's kernels
        read: 16; for quantized formats 128 on TPUs and 32 on NVIDIA GPUs; on TPUs larger where the block tables of all
        rows would not fit in scalar memory. `head_dim_multiple` tells the platform; if left out, it is the current
        one. With layers of `compress_ratio`, a multiple of that.
      dtype: storage format of keys and values: bfloat16, float16 or float32; or quantized, with a scale for each token
        and head: int8, float8_e4m3fn or float8_e5m2; or for 32 entries of a head, int4, or 64, k5v3.
        int4 has 4 bits for each number; k5v3 has 5 for a key's and 3 for a value's, for attention loses more by keys.
      layout: "paged", or "contiguous": each row always has one block of `max_seq_len` tokens of its own.
      head_dim_multiple: the stored head_dim is rounded up to a multiple of this. Results never show the padding, but
        the padding takes memory. Default for the current platform: 128 on TPUs, 64 on NVIDIA GPUs, else 1.
      join_kv: whether two pool rows that would be padded are stored as one. One row holds the keys, or the values, of
        two heads if the layer has an even number of heads and is not quantized; else the values and keys of one head.
        In four bits a byte holds a number of each, if head_dim is a multiple of 32 (k5v3: 64) and
        `head_dim_multiple` of 128.
        "head": always one head's; a mesh with a device for each head needs this.
        Default: True on TPUs, where a head_dim of 64 or less then takes half the memory.
      stacked: whether equal layers are stored in one array, so that a `jax.lax.scan` over layers carries the array in
        place (`pools`, and with recurrent layers `states` and `state_slots`); `layer` may then be traced. Without a
        scan separate pools are better: XLA on a CPU copies a stacked pool.
      snapshot_every: with recurrent layers, the states of a row after every so many tokens stay in slots of their own,
        so that `truncate` can go back there: see `snapshots`. A multiple of `block_size`. Default: none stay.
      residual_length: for quantized layers, the number of tokens that a query reads as bfloat16: the newest ones, its
        own included. Older ones it reads as stored. 32 leave a sixth of what int4 costs SmolLM2-135M, and a fifth of
        what k5v3 does. Each quantized layer then has a residual layer, which stores these tokens in blocks of
        their own, as a layer with such a window does, and so `truncate` goes back no further than they reach; residual
        layers follow the model's in `layers`. KIVI (https://arxiv.org/abs/2402.02750) introduced the buffer. Default:
        none.

    Raises:
      ValueError: a field has a value that is not allowed. The message names the field, the value and what is allowed.

    >>> layer = LayerConfig(num_kv_heads=2, head_dim=64)
    >>> config = CacheConfig(layers=(layer,) * 2, max_seqs=4, max_seq_len=100, num_blocks=20)
    >>> config.max_blocks_per_seq, config.bytes_per_block
    (7, 16384)

    Layers with the same window, or the same chunk, form a group with its own block tables:

    >>> local = LayerConfig(num_kv_heads=2, head_dim=64, window=32)
    >>> config = CacheConfig(layers=(local, layer, local), max_seqs=4, max_seq_len=100, group_blocks=(12, 28))
    >>> config.groups, config.group_windows
    (((0, 2), (1,)), (32, None))

    Four bits, and the newest tokens in bfloat16:

    >>> config = CacheConfig(layers=(layer,) * 2, max_seqs=4, max_tokens=320, dtype="int4", residual_length=32)
    >>> config.num_layers, len(config.layers), config.groups
    (2, 4, ((0, 1), (2, 3)))
    """

    layers: Sequence[LayerConfig]  # type: ignore[assignment]
    max_seqs: int
    # None means left out by the caller; `__post_init__` makes all of these integers.
    max_seq_len: int = None  # type: ignore[assignment]
    num_blocks: int = None  # type: ignore[assignment]
    group_blocks: Sequence[int] = None  # type: ignore[assignment]
    max_tokens: int = None  # type: ignore[assignment]
    block_size: int = None  # type: ignore[assignment]
    dtype: Any = "bfloat16"
    layout: Literal["paged", "contiguous"] = "paged"
    head_dim_multiple: int = None  # type: ignore[assignment]
    join_kv: bool | Literal["head"] = None  # type: ignore[assignment]
    stacked: bool = False
    snapshot_every: int | None = None
    residual_length: int | None = None

    def __post_init__(self):
        put = functools.partial(object.__setattr__, self)
        put("layers", tuple(read_list("CacheConfig.layers", self.layers)))
        if not self.layers:
            raise ValueError("CacheConfig.layers must name at least one LayerConfig, but it is empty.")
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, LayerConfig):
                raise ValueError(f"CacheConfig.layers[{i}] must be a LayerConfig, not {show(layer)}.")
            checks.check_shared(self, i, layer)
        if not isinstance(self.layout, str) or self.layout not in ("paged", "contiguous"):
            raise ValueError(f"CacheConfig.layout must be 'paged' or 'contiguous', not {show(self.layout)}.")
        put("dtype", kind_of(self.dtype, "CacheConfig.dtype").declared_dtype)
        self._settle_residual(put)
        checks.check_recurrent(self)
        flag("CacheConfig.stacked", self.stacked)
        if self.head_dim_multiple is None:
            put("head_dim_multiple", HEAD_DIM_MULTIPLES.get(jax.default_backend(), 1))
        if self.join_kv is None:
            put("join_kv", jax.default_backend() in JOINING)
        if not (isinstance(self.join_kv, str) and self.join_kv == "head"):
            put("join_kv", flag("CacheConfig.join_kv", self.join_kv, or_else="head"))
        self._drop_settled(put)
        for field in ("max_seqs", "head_dim_multiple", "max_seq_len", "num_blocks", "max_tokens", "block_size"):
            value, optional = getattr(self, field), field != "max_seqs"
            if not (optional and value is None):
                # Tokens of all rows together index nothing, so they may exceed an int32.
                most = 2**62 if field == "max_tokens" else MOST_INDEX
                put(field, integer(f"CacheConfig.{field}", value, least=1, most=most))
        if self.max_seq_len is None:
            if self.max_tokens is None:
                raise ValueError(
                    "CacheConfig needs max_seq_len, the most tokens of one row (or max_tokens, of all rows)."
                )
            put("max_seq_len", integer("CacheConfig.max_seq_len (max_tokens, as it is not given)", self.max_tokens))
            if self.layout == "contiguous":
                put("max_tokens", None)  # the caller meant one row
        if self.layout == "contiguous":
            self._settle_contiguous(put)
        else:
            self._settle_paged(put)
        checks.check_formats(self)
        if self.snapshot_every is not None:
            put("snapshot_every", integer("CacheConfig.snapshot_every", self.snapshot_every, least=1))
            checks.check_snapshots(self, self.snapshot_every)
        checks.check_indices(self)
        checks.check_evicting(self)
        sizes = {name: getattr(self, name) for name in ("num_blocks", "max_tokens", "group_blocks")}
        given = [name for name, size in sizes.items() if not isinstance(size, _Settled | _SettledBlocks)]
        put("size_argument", given[0] if given else "max_seqs")

    def _settle_residual(self, put) -> None:
        given = tuple(layer for layer in self.layers if not layer.is_residual)
        if not given:
            raise ValueError(
                "CacheConfig.layers names residual layers alone, which CacheConfig makes by itself: give the model's "
                "layers, and residual_length."
            )
        if self.residual_length is not None:
            put("residual_length", integer("CacheConfig.residual_length", self.residual_length, least=1))
            checks.check_residual(self, given, self.residual_length)
            given += tuple(x.make_residual(self.residual_length) for x in given if x.keeps_quantized(self.dtype))
        put("layers", given)

    @property
    def settled_fields(self) -> tuple[str, ...]:
        """Names of the sizes that the config derived."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return tuple(name for name, x in values.items() if isinstance(x, _Settled | _SettledBlocks))

    @property
    def default_block_size(self) -> int:
        """The `block_size` of this cache if none is given."""
        kinds = [self.kind(i) for i in range(len(self.layers))]
        lines = self.max_seqs * max(self.group_heads, default=1)
        size = choose_block_size(kernel_platform(self.head_dim_multiple), kinds, lines, self.max_seq_len)
        return math.lcm(size, count_tokens_of_entries(self.layers))

    def _drop_settled(self, put) -> None:
        sizes = [field for field in ("num_blocks", "max_tokens", "group_blocks") if getattr(self, field) is not None]
        settled = [field for field in sizes if isinstance(getattr(self, field), _Settled | _SettledBlocks)]
        for field in settled if len(settled) < len(sizes) or self.layout == "contiguous" else ():
            put(field, None)
        if self.layout == "contiguous" and isinstance(self.block_size, _Settled):
            put("block_size", None)

    def __repr__(self) -> str:
        # What follows from other fields is left out, and so is what is usual on most platforms.
        usual = {"head_dim_multiple": 1, "join_kv": False, "max_tokens": self.num_blocks * self.block_size}
        if self.contiguous:
            usual |= {"num_blocks": self.max_seqs, "block_size": self.max_seq_len}
        is_uniform = self.group_blocks == tuple(self.num_blocks * heads for heads in self.group_heads)
        sizes = {"group_blocks": ""} if is_uniform else {"num_blocks": "", "group_blocks": repr((*self.group_blocks,))}
        return write_fields(self, usual, layers=write_layers(self.layers[: self.num_layers]), **sizes)

    def _settle_paged(self, put) -> None:
        if self.block_size is None:
            put("block_size", _Settled(self.default_block_size))
        checks.check_compressed(self)
        if self.group_blocks is not None:
            self._settle_group_blocks(put)
        if self.max_tokens is None and self.num_blocks is None:
            raise ValueError(
                "CacheConfig needs num_blocks (blocks per layer) or max_tokens (tokens of all rows). For every row to "
                f"reach max_seq_len at once it would be num_blocks={self.max_seqs * self.max_blocks_per_seq}."
            )
        if self.num_blocks is None:
            put("num_blocks", _Settled(-(-self.max_tokens // self.block_size)))
        elif self.max_tokens is None:
            put("max_tokens", _Settled(self.num_blocks * self.block_size))
        elif self.num_blocks != -(-self.max_tokens // self.block_size):
            raise ValueError(
                f"CacheConfig.max_tokens={self.max_tokens} takes {-(-self.max_tokens // self.block_size)} blocks of "
                f"{self.block_size}, but num_blocks is {self.num_blocks}: name one of the two."
            )
        if self.group_blocks is None:
            put("group_blocks", _SettledBlocks(self.num_blocks * heads for heads in self.group_heads))

    def _settle_group_blocks(self, put) -> None:
        given = read_list("CacheConfig.group_blocks", self.group_blocks)
        blocks = tuple(integer("CacheConfig.group_blocks", n, least=1) for n in given)
        if len(blocks) != len(self.groups):
            raise ValueError(
                f"CacheConfig.group_blocks must have one number for each of the {len(self.groups)} groups of layers "
                f"(windows {self.group_windows}), not {len(blocks)}."
            )
        most = max(-(-n // heads) for n, heads in zip(blocks, self.group_heads, strict=True))
        if self.num_blocks not in (None, most):
            raise ValueError(
                f"CacheConfig.num_blocks is the largest of group_blocks, {most}, not {self.num_blocks}: leave it out."
            )
        put("group_blocks", blocks)
        put("num_blocks", _Settled(most))

    def _settle_contiguous(self, put) -> None:
        most = self.max_seqs * self.max_seq_len
        fixed = {"block_size": self.max_seq_len, "num_blocks": self.max_seqs, "max_tokens": most}
        for field, value in fixed.items():
            if getattr(self, field) not in (None, value):
                raise ValueError(
                    f"CacheConfig.{field} is {value} in the contiguous layout (one block of max_seq_len tokens per "
                    f"row), not {getattr(self, field)}: leave it out."
                )
            put(field, _Settled(value))
        checks.check_compressed(self)
        put("group_blocks", _SettledBlocks((self.max_seqs,)))

    @classmethod
    def from_model(
        cls,
        model: Any,
        *,
        max_seqs: int,
        max_seq_len: int,
        num_blocks: int | None = None,
        max_tokens: int | None = None,
        group_blocks: Sequence[int] | None = None,
        memory_bytes: float | None = None,
        step_tokens: int | None = None,
        prefix_cache: bool = False,
        dtype: Any = None,
        mesh: Mesh | None = None,
        snapshot_every: int | None = None,
        **fields: Unpack[LayoutFields],
    ) -> "CacheConfig":
        """Makes the config for a model with `layer_configs` (one `LayerConfig` per layer) and `dtype`. The layers are
        stacked if the model has a true `scan`, that is, scans over its layers.

        Args:
          num_blocks, max_tokens, group_blocks: see `CacheConfig`. Without them and `memory_bytes`, every row can reach
            `max_seq_len` at once.
          memory_bytes: bytes of all blocks, null blocks included; see `with_memory`.
          step_tokens: maximum tokens of one step, all rows together. Layers with a window then get no more blocks than
            their windows and one step can fill.
          prefix_cache: whether a `PrefixCache` will keep windows of prompts that are in no row. Layers with a window
            then get up to a quarter of the bytes of the other layers more, in proportion to what their rows take.
          mesh: the mesh of the cache, as in `init(config, mesh=mesh)`; default: the model's. Heads are not stored in
            pairs if pairs cannot be divided among its devices; see `join_kv`.
          snapshot_every: see `CacheConfig`.
        """
        for name in ("layer_configs", "dtype") if dtype is None else ("layer_configs",):
            if not hasattr(model, name):
                raise ValueError(
                    "model must have layer_configs, a LayerConfig for each layer, and dtype, by which its cache is "
                    f"made, but this {type(model).__name__} has no {name}."
                )
        max_seqs = integer("max_seqs", max_seqs, least=1)
        max_seq_len = integer("max_seq_len", max_seq_len, least=1)
        if step_tokens is not None:
            step_tokens = integer("step_tokens", step_tokens, least=1)
        given: dict[str, Any] = {"stacked": getattr(model, "scan", False), "snapshot_every": snapshot_every, **fields}
        sizes = {"num_blocks": num_blocks, "max_tokens": max_tokens, "group_blocks": group_blocks}
        sizes = {name: size for name, size in sizes.items() if size is not None}
        if memory_bytes is not None and sizes:
            raise ValueError(f"CacheConfig.from_model takes memory_bytes or {' and '.join(sizes)}, not both.")
        given |= sizes or {"max_tokens": max_seqs * max_seq_len}
        config = cls(
            layers=model.layer_configs,
            max_seqs=max_seqs,
            max_seq_len=max_seq_len,
            dtype=model.dtype if dtype is None else dtype,
            **given,
        )
        if not sizes and not config.contiguous:
            config._note_size("num_blocks")
        mesh = find_mesh(model) if mesh is None else check_mesh(mesh)
        count = mesh.shape.get(HEADS, 1) if mesh is not None else 1
        if given.get("join_kv") is None and not all(config.pairs_divide(i, count) for i in range(len(config.layers))):
            config = config.replace(join_kv="head")
        if memory_bytes is not None:
            return config.with_memory(memory_bytes, step_tokens=step_tokens, prefix_cache=prefix_cache)
        if config.contiguous or group_blocks is not None:
            return config
        # By default every row gets whole blocks: its last block may be partly used.
        every = config.num_blocks if sizes else max_seqs * config.max_blocks_per_seq
        sized = config._with_blocks(every, step_tokens, flag("prefix_cache", prefix_cache))
        return config if sized.group_blocks == config.group_blocks else sized

    def with_memory(
        self, memory_bytes: float, *, step_tokens: int | None = None, prefix_cache: bool = False
    ) -> "CacheConfig":
        """Returns this config with as many blocks as fit into `memory_bytes`, every layer's null block included.

        Layers with a window get as many blocks as they can use (see `from_model`); the others share the rest.
        """
        memory_bytes, prefix_cache = real("memory_bytes", memory_bytes, least=0), flag("prefix_cache", prefix_cache)
        if step_tokens is not None:
            step_tokens = integer("step_tokens", step_tokens, least=1)
        if self.contiguous:
            raise ValueError(
                f'memory_bytes cannot size a cache with layout="contiguous": it takes {self.bytes} bytes for max_seqs='
                f"{self.max_seqs} rows of {self.max_seq_len} tokens. Choose those, or the paged layout."
            )
        least = self._with_blocks(1, step_tokens, prefix_cache).bytes
        if memory_bytes < least:
            layers = f"{self.num_layers} layer{'s' * (self.num_layers > 1)}"
            raise ValueError(
                f"memory_bytes={memory_bytes:g} is too little: one block of {self.block_size} tokens takes "
                f"{self.bytes_per_block} bytes over {layers}, and one more is the null block."
            )
        most = int(memory_bytes) // (self.bytes_per_group_block(self._widest) * self.group_heads[self._widest])
        if most > MOST_INDEX // 2:
            raise ValueError(
                f"memory_bytes={memory_bytes:g} would hold {most} blocks, more than the {MOST_INDEX // 2} that it can "
                "be shared out among: give less, or a larger block_size."
            )
        num_blocks, step = 1, 1 << most.bit_length()
        while step := step // 2:
            if self._with_blocks(num_blocks + step, step_tokens, prefix_cache).bytes <= memory_bytes:
                num_blocks += step
        return self._with_blocks(num_blocks, step_tokens, prefix_cache)._note_size("memory_bytes")

    def _with_blocks(self, num_blocks: int, step_tokens: int | None, prefix_cache: bool) -> "CacheConfig":
        """Gives `num_blocks` to the group with the longest context, and to the others what they can use at most."""
        blocks = [num_blocks * heads for heads in self.group_heads]
        windows = {
            g: min(num_blocks, self.window_blocks(kept, step_tokens))
            for g, kept in enumerate(self.retentions)
            if g != self._widest and kept.visible_tokens is not None
        }
        bytes_of = [self.bytes_per_group_block(g) for g in range(len(blocks))]
        taken = sum(n * bytes_of[g] for g, n in windows.items())
        whole = sum(n * bytes_of[g] for g, n in enumerate(blocks) if g not in windows)
        for g, own in windows.items():
            more = int(own * RETAINED_SHARE * whole / taken) if prefix_cache else 0
            blocks[g] = min(num_blocks, own + more)
        return self.resize(blocks)

    def resize(self, group_blocks: Iterable[int], **changes: Any) -> "CacheConfig":
        """Does `replace` for blocks that follow from this config's: `size_argument` stays what the caller gave."""
        return self.replace(group_blocks=tuple(group_blocks), **changes)._note_size(self.size_argument)

    def _note_size(self, name: str) -> "CacheConfig":
        object.__setattr__(self, "size_argument", name)
        return self

    def replace(self, **changes: Any) -> "CacheConfig":
        """Returns this config with other fields; sizes derived from them are derived again.

        >>> config = CacheConfig(layers=(LayerConfig(num_kv_heads=1, head_dim=8),), max_seqs=2, max_tokens=100)
        >>> config.replace(num_blocks=3).max_tokens
        48
        """
        sizes = {"num_blocks", "max_tokens", "group_blocks"}
        if self.contiguous or "layout" in changes:
            stale = sizes | {"block_size"}
        elif sizes & changes.keys():
            stale = sizes
        else:
            follows = {"layers": "group_blocks", "block_size": "max_tokens"}
            stale = {follows[field] for field in follows.keys() & changes.keys()}
        if isinstance(self.block_size, _Settled):
            stale = stale | {"block_size"}
        fields: Any = dict.fromkeys(stale) | changes
        made = dataclasses.replace(self, **fields)
        return made if sizes & changes.keys() or "layout" in changes else made._note_size(self.size_argument)


def check_config(config: Any) -> None:
    """Raises ValueError unless `config` is a `CacheConfig`."""
    if not isinstance(config, CacheConfig):
        raise ValueError(f"config must be a CacheConfig, which says what a cache is made for, not {show(config)}.")
