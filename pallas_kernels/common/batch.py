"""The arguments of every backend, bundled: the pool, where the step's tokens lie, what they see, what logits become."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.quantization import UNQUANTIZED, StorageFormat, find_format

register = jax.tree_util.register_dataclass


@functools.partial(register, data_fields=("kv", "scale"), meta_fields=("format", "latent_rank", "is_packed"))
@dataclasses.dataclass(frozen=True)
class StoredKV:
    """One layer's pool, and how it stores its numbers."""

    kv: Any  # [num_blocks + 1, 2, K, block_size, D'], keys at 0 and values at 1; of latent rows with 1 for 2
    scale: Any = None  # see `StorageFormat.scale_shape`
    format: StorageFormat = UNQUANTIZED
    latent_rank: int | None = None  # rows whose first so many numbers are the values, too
    is_packed: bool = False  # such rows hold a head's keys behind its values, and have scales of both apart

    @classmethod
    def bundle(cls, kv: Any, scale: Any = None, kind: str | None = None, rank: int | None = None) -> "StoredKV":
        """Returns the pool of public arguments. Only the shape of its scales says whether rows are packed."""
        format = find_format(kind)
        may_pack = rank is not None and format.is_quantized and scale is not None and len(scale.shape) >= 4
        return cls(kv, scale, format, rank, may_pack and scale.shape[1] == 2)

    @property
    def half_rank(self) -> int | None:
        """The rank of rows that have a scale for each half."""
        return None if self.is_packed else self.latent_rank

    @property
    def packed_rank(self) -> int | None:
        """The rank of packed rows."""
        return self.latent_rank if self.is_packed else None

    def join_scales(self) -> "StoredKV":
        """Returns the pool with the scales of packed rows one after another, as those of other rows are, if they are
        scales of groups of entries: a copy of all of them."""
        if not self.is_packed or self.format.group_size is None or self.scale is None:
            return self
        keys, values = self.scale[:, :1], self.scale[:, 1:]
        return dataclasses.replace(self, scale=jnp.concatenate([values, keys], axis=-1), is_packed=False)

    @property
    def pools(self) -> Any:
        """The array or, of a quantized pool, the two: what public functions return."""
        return (self.kv, self.scale) if self.format.is_quantized else self.kv

    def value_dim(self, head_dim: int) -> int:
        """Returns the width of the values, and of the output."""
        return head_dim if self.latent_rank is None else self.latent_rank

    def replace(self, kv: Any, scale: Any = None) -> "StoredKV":
        """Returns the same with other arrays."""
        return dataclasses.replace(self, kv=kv, scale=scale)


class PagedBatch(NamedTuple):
    """Where the tokens of a step lie, an entry for each row."""

    block_tables: Any  # i32[S, M]: the physical block of each logical block
    kv_lens: Any  # i32[S]: tokens of each row, this step's included
    query_lens: Any  # i32[S]: how many of them are this step's
    query_starts: jax.Array | None = None  # i32[S]: where packed tokens of each row start; None: one after another
    context_shard: jax.Array | None = None  # i32[2]: the pool holds this one of so many equal runs of every block


@functools.partial(
    register,
    data_fields=("mask", "spans", "tree", "blocks", "tokens"),
    meta_fields=("window", "chunk", "sink_tokens", "residual_length", "compress_ratio", "causal"),
)
@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """Which positions of its row a token sees; see `pallas_kernels.paged_attention`."""

    window: int | None = None
    chunk: int | None = None
    sink_tokens: int | None = None
    residual_length: int | None = None  # backends are given one by `write_and_attend` alone
    compress_ratio: int | None = None  # tokens of an entry; backends are given one for rows with several tokens alone
    causal: bool = True
    mask: jax.Array | None = None
    spans: jax.Array | None = None
    tree: jax.Array | None = None
    blocks: jax.Array | None = None
    tokens: jax.Array | None = None

    @property
    def by_token(self) -> bool:
        """Whether what a token sees depends on more than its position and a window."""
        return any(x is not None for x in (self.chunk, self.tree, self.spans))


def leave_out_newest(batch: PagedBatch, mask: MaskSpec) -> tuple[PagedBatch, MaskSpec]:
    """Returns rows that end before their newest `residual_length` tokens, which queries then do not see: they stand as
    far ahead."""
    if mask.residual_length is None:
        return batch, mask
    kv_lens = jnp.maximum(batch.kv_lens - mask.residual_length, 0)
    return batch._replace(kv_lens=kv_lens), dataclasses.replace(mask, residual_length=None)


def forget_ratio(q: Any, mask: MaskSpec) -> MaskSpec:
    """Returns the mask without its `compress_ratio` if every query sees all entries of its row: where no row has more
    than one of them, or they are not causal."""
    sees_all = not mask.causal or (q is not None and q.ndim == 4 and q.shape[1] == 1)
    return dataclasses.replace(mask, compress_ratio=None) if sees_all else mask


def count_entries(q: Any, batch: PagedBatch, mask: MaskSpec) -> tuple[PagedBatch, MaskSpec]:
    """Returns rows whose tokens are the entries, where `forget_ratio` can."""
    plain = forget_ratio(q, mask)
    if mask.compress_ratio is None or plain is mask:
        return batch, mask
    return batch._replace(kv_lens=batch.kv_lens // mask.compress_ratio), plain


@functools.partial(
    register,
    data_fields=("scale", "soft_cap", "sinks", "alibi", "shared"),
    meta_fields=("return_lse", "deterministic"),
)
@dataclasses.dataclass(frozen=True)
class SoftmaxOptions:
    """What becomes of logits, and how the result is to be computed; see `pallas_kernels.paged_attention`."""

    scale: Any = None
    soft_cap: Any = None
    sinks: jax.Array | None = None
    alibi: jax.Array | None = None
    shared: Any = None  # i32[4, S]
    return_lse: bool = False
    deterministic: bool = False

    def logit_scale(self, head_dim: int) -> Any:
        """Returns what products are multiplied by."""
        return head_dim**-0.5 if self.scale is None else self.scale


class Call(NamedTuple):
    """The arguments of an op. Where only shapes are asked about, what is not known is None."""

    stored: StoredKV
    batch: PagedBatch
    mask: MaskSpec = MaskSpec()
    options: SoftmaxOptions = SoftmaxOptions()
    q: Any = None
    k: Any = None
    v: Any = None

    def given_options(self) -> dict[str, Any]:
        """Returns by their public names the options that ask for more than causal attention over whole rows."""
        mask, options = self.mask, self.options
        fields = {
            "alibi": options.alibi, "spans": mask.spans, "tree": mask.tree, "causal": None if mask.causal else False,
            "chunk": mask.chunk, "blocks": mask.blocks, "deterministic": options.deterministic or None,
            "sink_tokens": mask.sink_tokens, "stripe": self.batch.context_shard, "tokens": mask.tokens,
            "residual_length": mask.residual_length, "compress_ratio": mask.compress_ratio,
        }  # fmt: skip
        return {name: x for name, x in fields.items() if x is not None}


def bundle_call(*, kv: Any = None, tables: Any = None, lengths: Any = None, new: Any = None, **given: Any) -> Call:
    """Returns the call of an op's public arguments, by name."""

    def take(*names: str) -> dict[str, Any]:
        return {name: given.pop(name) for name in names if name in given}

    stored = StoredKV.bundle(kv, given.pop("kv_scale", None), given.pop("kind", None), given.pop("rank", None))
    batch = PagedBatch(tables, lengths, new, given.pop("offsets", None), given.pop("stripe", None))
    given |= {name: as_float(given[name]) for name in ("scale", "soft_cap") if name in given}
    mask = MaskSpec(**take(*(field.name for field in dataclasses.fields(MaskSpec))))
    options = SoftmaxOptions(**take(*(field.name for field in dataclasses.fields(SoftmaxOptions))))
    return Call(stored, batch, mask, options, **given)


def as_float(x: Any) -> Any:
    """Returns an integer of Python or NumPy as a float, since JAX has integers of 32 bits; anything else as it is."""
    is_integer = isinstance(x, int | np.integer) and not isinstance(x, bool)
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu":
        return x.astype(np.float32)
    return float(x) if is_integer and abs(x) < 2**1023 else x
