"""What the front door checks of shapes, dtypes and options: each refusal says what was expected and what came."""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api.show import show
from pallas_kernels.common.batch import Call, MaskSpec, StoredKV
from pallas_kernels.common.quantization import QUANTIZED

POOL = ("kv", "tables", "lengths", "new")  # arrays that no op can do without
MOST_INDEX = 2**31 - 1
LARGEST = float(np.finfo(np.float32).max)
# What None says in the place of an integer.
NONE_MEANS = {
    "window": "no window", "chunk": "no chunks", "sink_tokens": "no first tokens", "rank": "no latent rows",
    "residual_length": "that tokens see their row's newest tokens too", "compress_ratio": "that keys are of tokens",
}  # fmt: skip


def check_pool(call: Call, needed: Collection[str]) -> None:
    """Raise for what is no array, and for a pool, tables, counts or tokens that are not of their shapes and dtypes.

    Args:
      needed: names of arrays that may not be None; none, where only shapes are asked about.
    """
    stored, batch = call.stored, call.batch
    kv, tables = stored.kv, batch.block_tables
    counts = {"lengths": batch.kv_lens, "new": batch.query_lens, "offsets": batch.query_starts}
    arrays = {"q": call.q, "k": call.k, "v": call.v, "kv": kv, "kv_scale": stored.scale, "tables": tables} | counts
    for name, x in arrays.items():
        if x is not None or name in needed:
            _check_array(name, x)
    _check_integer("rank", stored.latent_rank)
    halves, latent = (2, "") if stored.latent_rank is None else (1, " of latent rows")
    if kv.ndim != 5 or kv.shape[1] != halves:
        raise ValueError(
            f"kv must be a pool{latent} [num_blocks + 1, {halves}, K, block_size, D], but its shape is {kv.shape}."
        )
    if tables.ndim != 2:
        raise ValueError(f"tables must be i32[rows, max_blocks_per_seq], but its shape is {tables.shape}.")
    for name, x in counts.items():
        if x is not None and x.shape != tables.shape[:1]:
            raise ValueError(
                f"{name} must have one entry for each of the {tables.shape[0]} rows, but its shape is {x.shape}."
            )
    for name, x in ({"tables": tables} | counts).items():
        if x is not None and x.dtype != jnp.int32 and needed:
            raise ValueError(f"{name} must be int32, not {x.dtype}: convert it with {name}.astype(jnp.int32).")
    for name, inner in {"q": "H, D", "k": "K, D"}.items():
        if arrays[name] is not None:
            _check_tokens(name, arrays[name], tables.shape[0], inner)
    if (shard := batch.context_shard) is not None:
        _check_array("stripe", shard)
        if shard.dtype != jnp.int32 or shard.shape != (2,):
            raise ValueError(
                f"stripe must be i32[2], which of how many runs of every block the pool holds, not "
                f"{shard.dtype}{list(shard.shape)}."
            )


def _check_array(name: str, x) -> None:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise ValueError(f"{name} must be an array, not a {type(x).__name__}: make it one by jnp.asarray.")


def _check_integer(name: str, x) -> None:
    """Raise for what is neither an integer above 0 nor None."""
    if x is None:
        return
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or not 1 <= x <= MOST_INDEX:
        raise ValueError(
            f"{name} must be an integer from 1 to {MOST_INDEX}, not {show(x)}: None means {NONE_MEANS[name]}."
        )


def _check_tokens(name: str, x, rows: int, inner: str) -> None:
    if x.ndim not in (3, 4):
        raise ValueError(f"{name} must be padded [S, T, {inner}] or packed [N, {inner}], but its shape is {x.shape}.")
    if x.ndim == 4 and x.shape[0] != rows:
        raise ValueError(
            f"{name} has {x.shape[0]} rows, but the tables have {rows}: padded tokens need one row for each."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, not {x.dtype}.")


def check_format(stored: StoredKV, head_dim: int) -> None:
    """Raise where a quantized pool or its scales are not stored as its format says."""
    format = stored.format
    if not format.is_quantized:
        if stored.kv.dtype == jnp.uint8:
            raise ValueError(
                f"kv holds bytes of a quantized format, but kind= does not name it: give one of {', '.join(QUANTIZED)}."
            )
        return
    if stored.kv.dtype != format.storage_dtype:
        raise ValueError(f"A pool of kind {format.name} is stored as {format.storage_dtype}, not {stored.kv.dtype}.")
    if head_dim % format.numbers_per_entry:
        raise ValueError(f"{format.name} stores two numbers to a byte, so head_dim must be even, not {head_dim}.")
    if stored.scale is None:
        raise ValueError(f"A pool of kind {format.name} needs kv_scale, what its numbers are multiplied by.")
    if format.mixes_pairs and stored.half_rank is not None:
        raise ValueError(
            f"{format.name} stores as many keys as values, so its rows have scales of both apart, kv_scale "
            f"{format.scale_shape(stored.kv.shape, head_dim, stored.half_rank, packed=True)}, not "
            f'{stored.scale.shape}: store latent rows in "int4" or "int8".'
        )
    if stored.scale.dtype not in format.scale_dtypes:
        allowed = " or ".join(dtype.name for dtype in format.scale_dtypes)
        raise ValueError(f"kv_scale must be {allowed}, not {stored.scale.dtype}.")


def check_new_scale(kv_scale, kind) -> None:
    """Raise where a call that writes has scales and no kind, which would leave them as they are."""
    if kv_scale is not None and kind is None:
        raise ValueError(
            f"kv_scale without kind does not say how to store new numbers: name the kind, one of "
            f"{', '.join(QUANTIZED)}, or leave kv_scale out."
        )


def check_new(k, v, stored: StoredKV, rows: int) -> None:
    """Raise where a step's keys and values do not fit each other or the pool."""
    if stored.latent_rank is not None:
        if v is not None:
            raise ValueError(
                f"v must be None for latent rows: their values are the first {stored.latent_rank} numbers of k."
            )
    elif v is None:
        raise ValueError("v must be an array like k: only latent rows, those of a pool with a rank, have none.")
    elif k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"k and v must be alike, but k is {k.dtype}{list(k.shape)} and v is {v.dtype}{list(v.shape)}.")
    if k.shape[-2] != stored.kv.shape[2]:
        raise ValueError(
            f"k has {k.shape[-2]} heads, but the pool has {stored.kv.shape[2]} KV heads: give k and v as they are "
            "before they are repeated for query heads, [..., K, D]."
        )
    if stored.format.stored_dim(k.shape[-1]) > stored.kv.shape[4]:
        raise ValueError(f"k has head_dim {k.shape[-1]}, but the pool stores {stored.kv.shape[4]}.")


def check_query_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise where query heads cannot be shared among KV heads."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be shared among {num_kv_heads} KV heads: H must be a multiple of K."
        )


def check_attention(call: Call) -> None:
    """Raise where queries and options do not fit each other or the pool."""
    q, (kv, rank), options = call.q, (call.stored.kv, call.stored.latent_rank), call.options
    _check_kinds(call)
    num_heads, head_dim = q.shape[-2:]
    check_query_heads(num_heads, kv.shape[2])
    if call.stored.format.stored_dim(head_dim) > kv.shape[4]:
        raise ValueError(f"q has head_dim {head_dim}, but the pool stores {kv.shape[4]}.")
    if rank is not None and not 1 <= rank <= head_dim:
        raise ValueError(f"rank must be from 1 to {head_dim}, the width of q, not {rank}.")
    if rank is not None and options.scale is None:
        raise ValueError(
            "scale must be given for latent rows: it goes by the width that heads had before queries were absorbed, "
            "which these shapes do not tell."
        )
    _check_scales(call.stored, head_dim)
    if options.sinks is not None and options.sinks.shape != (num_heads,):
        raise ValueError(
            f"sinks must have one entry for each of the {num_heads} query heads, but its shape is "
            f"{options.sinks.shape}."
        )
    chunk, window, mask = call.mask.chunk, call.mask.window, call.mask.mask
    if chunk is not None and window is not None:
        raise ValueError(f"chunk={chunk} and window={window} cannot both limit what a token sees: leave one out.")
    if mask is not None and (mask.dtype != jnp.bool_ or mask.shape[:-1] != q.shape[:-2]):
        raise ValueError(
            f"mask must be bool[{', '.join(map(str, q.shape[:-2]))}, C], not {mask.dtype}{list(mask.shape)}."
        )
    _check_variants(call)


def _check_scales(stored: StoredKV, head_dim: int) -> None:
    """Raise for scales of another shape than the pool's."""
    format, rank = stored.format, stored.latent_rank
    if stored.scale is None:
        return
    if (
        stored.is_packed
        and format.group_size is not None
        and rank is not None
        and (head_dim != 2 * rank or rank % format.group_size)
    ):
        raise ValueError(
            f"Rows of {format.name} with scales of keys and values apart hold as many keys as values, in multiples of "
            f"{format.group_size}, not {head_dim - rank} and {rank}: leave rank out, and store them in two arrays."
        )
    wanted, of_packed = (format.scale_shape(stored.kv.shape, head_dim, rank, packed) for packed in (False, True))
    if stored.scale.shape == (of_packed if stored.is_packed else wanted):
        return
    size = format.group_size
    by_group = f", and one for every {size} entries of a head" if size else ", and two" if rank else ""
    packed = f" (or {of_packed}, where keys stand behind the values)" if format.is_quantized and rank else ""
    raise ValueError(
        f"kv_scale must have the pool's shape without its last axis{by_group}, {wanted}{packed}, not "
        f"{stored.scale.shape}."
    )


def _check_kinds(call: Call) -> None:
    """Raise for options that are no number, integer, flag or array where one is taken."""
    mask, options = call.mask, call.options
    check_numbers(options.scale, options.soft_cap, mask.window, mask.chunk)
    for name in ("sink_tokens", "residual_length", "compress_ratio"):
        _check_integer(name, getattr(mask, name))
    flags = {"causal": mask.causal, "deterministic": options.deterministic, "return_lse": options.return_lse}
    for name, x in flags.items():
        if not isinstance(x, bool | np.bool):
            raise ValueError(f"{name} must be True or False, not {show(x)}.")
    arrays = {name: getattr(options, name) for name in ("sinks", "alibi", "shared")}
    arrays |= {name: getattr(mask, name) for name in ("mask", "spans", "tree", "blocks", "tokens")}
    for name, x in arrays.items():
        if x is not None:
            _check_array(name, x)


def check_numbers(scale=None, soft_cap=None, window=None, chunk=None) -> None:
    """Raise for numbers that no logit can be made of, or no window or chunk."""
    for name, x in {"scale": scale, "soft_cap": soft_cap}.items():
        if isinstance(x, np.ndarray) and not x.shape:
            x = x.item()
        if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            if x.shape:
                raise ValueError(f"{name} must be a number or a scalar array, but its shape is {x.shape}.")
            if not jnp.issubdtype(x.dtype, np.number):
                raise ValueError(f"{name} must be a number or a scalar array of one, not of {x.dtype}.")
        elif x is not None and not _is_above_0(x):
            raise ValueError(f"{name} must be a finite number above 0, not {show(x)}: leave it out for the default.")
    _check_integer("window", window)
    _check_integer("chunk", chunk)


def _is_above_0(x) -> bool:
    """Tells whether `x` is a Python or NumPy number above 0 that float32 can hold."""
    x = x.item() if isinstance(x, np.generic) else x
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= LARGEST


def _check_variants(call: Call) -> None:
    """Raise for options that say who sees whom and are of another shape, or exclude each other."""
    q, rows, mask, options = call.q, call.batch.block_tables.shape[0], call.mask, call.options
    num_heads = q.shape[-2]
    if mask.sink_tokens is not None and mask.window is None:
        raise ValueError("sink_tokens are seen beside a window, and there is none: give window, or leave them out.")
    alibi, blocks, shared = options.alibi, mask.blocks, options.shared
    if alibi is not None and (alibi.shape != (num_heads,) or not jnp.issubdtype(alibi.dtype, jnp.floating)):
        raise ValueError(
            f"alibi must be f32[{num_heads}], one slope for each query head, not {alibi.dtype}{list(alibi.shape)}."
        )
    for name, x in {"spans": mask.spans, "tree": mask.tree}.items():
        if x is not None and (x.dtype != jnp.int32 or x.shape != q.shape[:-2]):
            raise ValueError(
                f"{name} must be i32{list(q.shape[:-2])}, one number for each token, not {x.dtype}{list(x.shape)}."
            )
    if blocks is not None and (blocks.dtype != jnp.int32 or len(blocks.shape) != 2 or blocks.shape[0] != rows):
        raise ValueError(
            f"blocks must be i32[{rows}, n], the logical blocks of each row to read, not "
            f"{blocks.dtype}{list(blocks.shape)}."
        )
    if shared is not None and (shared.dtype != jnp.int32 or shared.shape != (4, rows)):
        raise ValueError(
            f"shared must be i32[4, {rows}], as find_shared returns it, not {shared.dtype}{list(shared.shape)}."
        )
    _check_tokens_option(call)
    _check_residual_length(mask)
    _check_compress_ratio(call)
    if mask.tree is not None and (mask.spans is not None or mask.mask is not None):
        raise ValueError(
            f"tree says by itself what a token sees, and cannot be combined with "
            f"{'spans' if mask.spans is not None else 'mask'}: leave one out."
        )
    by_position = {name: getattr(mask, name) for name in ("window", "sink_tokens")} | {"alibi": alibi}
    by_position |= {name: getattr(mask, name) for name in ("spans", "tree")}
    measured = [name for name, x in by_position.items() if x is not None]
    if not mask.causal and measured:
        raise ValueError(
            f"causal=False lets every query see the whole row, and gives it no position to measure {measured[0]} "
            f"from: leave {measured[0]} out, or say what is seen with mask."
        )


def _check_tokens_option(call: Call) -> None:
    """Raise for `tokens` of another shape, or beside what says otherwise which tokens are seen."""
    tokens, axes, mask = call.mask.tokens, call.q.shape[:-2], call.mask
    if tokens is None:
        return
    if tokens.dtype != jnp.int32 or len(tokens.shape) != len(axes) + 1 or tokens.shape[:-1] != axes:
        raise ValueError(
            f"tokens must be i32[{', '.join(map(str, axes))}, n], the positions that each token of q attends to, not "
            f"{tokens.dtype}{list(tokens.shape)}."
        )
    others = {name: getattr(mask, name) for name in ("tree", "spans", "mask", "blocks")}
    if beside := [name for name, x in others.items() if x is not None]:
        raise ValueError(
            f"tokens says by itself what each token sees, and cannot be combined with {beside[0]}: leave one out."
        )


def _check_residual_length(mask: MaskSpec) -> None:
    """Raise for a `residual_length` beside what does not go by a token's position alone."""
    if mask.residual_length is None:
        return
    others = {name: getattr(mask, name) for name in ("tree", "spans", "tokens", "blocks", "chunk")}
    others["causal=False"] = None if mask.causal else False
    if beside := [name for name, x in others.items() if x is not None]:
        raise ValueError(
            f"residual_length goes by a token's position alone, and cannot be combined with {beside[0]}: leave one out."
        )


def _check_compress_ratio(call: Call) -> None:
    """Raise for a `compress_ratio` beside what goes by the positions of keys, or by the step's own keys."""
    mask, options = call.mask, call.options
    if mask.compress_ratio is None:
        return
    if call.k is not None:
        raise ValueError(
            f"compress_ratio={mask.compress_ratio} says that keys are entries of several tokens, and a step completes "
            "fewer of them than it has tokens: store them by write_kv, with lengths and new that count entries."
        )
    names = ("window", "chunk", "mask", "spans", "tree", "blocks", "residual_length")
    others = {name: getattr(mask, name) for name in names} | {"alibi": options.alibi, "shared": options.shared}
    others["stripe"] = call.batch.context_shard
    if beside := [name for name, x in others.items() if x is not None]:
        raise ValueError(
            f"compress_ratio={mask.compress_ratio} says that keys are entries of several tokens, and cannot be "
            f"combined with {beside[0]}: leave it out."
        )


def refuse_gradients(call: Call) -> Call:
    """Returns the call with keys and values that cannot be differentiated, if storing rounds them: of what is rounded
    only the scale has a gradient, which would be taken for that of the numbers."""
    if not call.stored.format.is_quantized:
        return call
    refuse = functools.partial(_refuse_gradient, call.stored.format.name)
    return call._replace(k=refuse(call.k), v=None if call.v is None else refuse(call.v))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refuse_gradient(kind: str, x):
    return x


@_refuse_gradient.defjvp
def _(kind: str, primals, tangents):
    raise ValueError(
        f"Keys and values have no gradient where they are stored in {kind}, which rounds them: differentiate with a "
        "cache of float32 or bfloat16, or give jax.lax.stop_gradient of them, for the gradient of queries alone."
    )
