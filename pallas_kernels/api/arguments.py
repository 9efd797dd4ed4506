"""What the front door checks of shapes, dtypes and options: each refusal says what was expected and what came."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import quantization as kinds


def check_pool(kv, tables, lengths, new, offsets, rank) -> None:
    parts, latent = (2, "") if rank is None else (1, " of latent rows")
    if kv.ndim != 5 or kv.shape[1] != parts:
        raise ValueError(
            f"kv must be a pool{latent} [num_blocks + 1, {parts}, K, block_size, D], but its shape is {kv.shape}."
        )
    if tables.ndim != 2:
        raise ValueError(f"tables must be i32[rows, max_blocks_per_seq], but its shape is {tables.shape}.")
    for name, x in {"lengths": lengths, "new": new, "offsets": offsets}.items():
        if x is not None and x.shape != tables.shape[:1]:
            raise ValueError(
                f"{name} must have one entry for each of the {tables.shape[0]} rows, but its shape is {x.shape}."
            )
    for name, x in {"tables": tables, "lengths": lengths, "new": new, "offsets": offsets}.items():
        if x is not None and x.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, not {x.dtype}: convert it with {name}.astype(jnp.int32).")


def _check_tokens(name: str, x, rows: int, inner: str) -> None:
    if x.ndim not in (3, 4):
        raise ValueError(f"{name} must be padded [S, T, {inner}] or packed [N, {inner}], but its shape is {x.shape}.")
    if x.ndim == 4 and x.shape[0] != rows:
        raise ValueError(
            f"{name} has {x.shape[0]} rows, but the tables have {rows}: padded tokens need one row for each."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, not {x.dtype}.")


def check_kind(kv, kv_scale, kind, head_dim: int) -> None:
    if kind is None:
        if kv.dtype == jnp.uint8:
            raise ValueError(
                "kv holds bytes, which stand for numbers of a quantised kind, and kind says of none: name it, one of "
                f"{', '.join(kinds.LARGEST)}."
            )
        return
    if kind not in kinds.LARGEST:
        raise ValueError(f"kind must be None or one of {', '.join(kinds.LARGEST)}, not {kind!r}.")
    if kv.dtype != kinds.storage_of(kind):
        raise ValueError(f"A pool of kind {kind} is stored as {kinds.storage_of(kind)}, not {kv.dtype}.")
    if kind == "int4" and head_dim % 2:
        raise ValueError(f"int4 stores two numbers to a byte, so head_dim must be even, not {head_dim}.")
    if kv_scale is None:
        raise ValueError(f"A pool of kind {kind} needs kv_scale, what its numbers are multiplied by.")
    if kv_scale.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"kv_scale must be float32 or bfloat16, not {kv_scale.dtype}.")


def check_new_scale(kv_scale, kind) -> None:
    """Of a call that writes: without a kind the scales would be left as they are."""
    if kv_scale is not None and kind is None:
        raise ValueError(
            f"kv_scale without kind does not say how to store new numbers: name the kind, one of "
            f"{', '.join(kinds.LARGEST)}, or leave kv_scale out."
        )


def check_new(k, v, kv, kind, tables, rank) -> None:
    _check_tokens("k", k, tables.shape[0], "K, D")
    if rank is not None:
        if v is not None:
            raise ValueError(f"v must be None for latent rows: their values are the first {rank} numbers of k.")
    elif k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"k and v must be alike, but k is {k.dtype}{list(k.shape)} and v is {v.dtype}{list(v.shape)}.")
    if k.shape[-2] != kv.shape[2]:
        raise ValueError(f"k has {k.shape[-2]} heads, but the pool has {kv.shape[2]} KV heads.")
    if kinds.stored_dim(kind, k.shape[-1]) > kv.shape[4]:
        raise ValueError(f"k has head_dim {k.shape[-1]}, but the pool stores {kv.shape[4]}.")


def check_query_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be shared among {num_kv_heads} KV heads: H must be a multiple of K."
        )


def check_attention(q, kv, tables, kv_scale, kind, scale, soft_cap, window, sinks, mask, rank, chunk) -> None:
    _check_tokens("q", q, tables.shape[0], "H, D")
    num_heads, head_dim = q.shape[-2:]
    check_query_heads(num_heads, kv.shape[2])
    if kinds.stored_dim(kind, head_dim) > kv.shape[4]:
        raise ValueError(f"q has head_dim {head_dim}, but the pool stores {kv.shape[4]}.")
    if rank is not None and not 1 <= rank <= head_dim:
        raise ValueError(f"rank must be from 1 to {head_dim}, the width of q, not {rank}.")
    if rank is not None and scale is None:
        raise ValueError(
            "scale must be given for latent rows: it goes by the width that heads had before queries were absorbed, "
            "which these shapes do not tell."
        )
    if kv_scale is not None:
        wanted, of_joined = (kinds.scale_shape(kv.shape, kind, head_dim, rank, joined) for joined in (False, True))
        if kv_scale.shape != (of_joined if kinds.is_joined(kv_scale, kind, rank) else wanted):
            by_group = ", and one for every 32 entries of a head" if kind == "int4" else ", and two" if rank else ""
            joined = (
                f" (or {of_joined}, where keys stand behind the values)" if kind not in (None, "int4") and rank else ""
            )
            raise ValueError(
                f"kv_scale must have the pool's shape without its last axis{by_group}, {wanted}{joined}, not "
                f"{kv_scale.shape}."
            )
    check_numbers(scale, soft_cap, window)
    for name, x in {"sinks": sinks, "mask": mask}.items():
        if x is not None and not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            raise ValueError(f"{name} must be an array, not {type(x).__name__}: make one of it with jnp.asarray.")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(
            f"sinks must have one entry for each of the {num_heads} query heads, but its shape is {sinks.shape}."
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}: None means no chunks.")
    if chunk is not None and window is not None:
        raise ValueError(f"chunk={chunk} and window={window} cannot both limit what a token sees: leave one out.")
    if mask is not None and (mask.dtype != jnp.bool_ or mask.shape[:-1] != q.shape[:-2]):
        raise ValueError(
            f"mask must be bool[{', '.join(map(str, q.shape[:-2]))}, C], not {mask.dtype}{list(mask.shape)}."
        )


def check_numbers(scale, soft_cap, window) -> None:
    for name, x in {"scale": scale, "soft_cap": soft_cap}.items():
        if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            if x.shape:
                raise ValueError(f"{name} must be a number or a scalar array, but its shape is {x.shape}.")
        elif x is not None and not _above_0(x):
            raise ValueError(f"{name} must be a finite number above 0, not {x!r:.99}: leave it out for the default.")
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, int | np.integer):
        raise ValueError(f"window must be an integer, not {window!r:.99}.")
    if window < 1:
        raise ValueError(f"window must be at least 1 (a token sees itself), not {window}: None means no window.")


def _above_0(x) -> bool:
    """Whether `x` is a number of Python's or NumPy's that float32 has, and above 0."""
    is_real = isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)
    return is_real and 0 < x <= float(np.finfo(np.float32).max)


def check_variants(q, tables, alibi, spans, tree, causal, blocks, deterministic, shared=None, **others) -> None:
    """What decides who sees whom, and what goes with what. `others` are the options that some of it excludes."""
    given = {name: x for name, x in others.items() if x is not None}
    num_heads = q.shape[-2]
    if (first := given.get("sink_tokens")) is not None:
        if isinstance(first, bool) or not isinstance(first, int | np.integer) or first < 1:
            raise ValueError(f"sink_tokens must be an integer, at least 1, not {first!r}: None means no first tokens.")
        if "window" not in given:
            raise ValueError("sink_tokens are seen beside a window, and there is none: give window, or leave them out.")
    if alibi is not None and (alibi.shape != (num_heads,) or not jnp.issubdtype(alibi.dtype, jnp.floating)):
        raise ValueError(
            f"alibi must be f32[{num_heads}], one slope for each query head, not {alibi.dtype}{list(alibi.shape)}."
        )
    for name, x in {"spans": spans, "tree": tree}.items():
        if x is not None and (x.dtype != jnp.int32 or x.shape != q.shape[:-2]):
            raise ValueError(
                f"{name} must be i32{list(q.shape[:-2])}, one number for each token, not {x.dtype}{list(x.shape)}."
            )
    if blocks is not None and (
        blocks.dtype != jnp.int32 or len(blocks.shape) != 2 or blocks.shape[0] != tables.shape[0]
    ):
        raise ValueError(
            f"blocks must be i32[{tables.shape[0]}, n], the logical blocks of each row to read, not "
            f"{blocks.dtype}{list(blocks.shape)}."
        )
    if shared is not None and (shared.dtype != jnp.int32 or shared.shape != (4, tables.shape[0])):
        raise ValueError(
            f"shared must be i32[4, {tables.shape[0]}], as find_shared returns it, not "
            f"{shared.dtype}{list(shared.shape)}."
        )
    for name, x in {"causal": causal, "deterministic": deterministic}.items():
        if not isinstance(x, bool | np.bool):
            raise ValueError(f"{name} must be True or False, not {x!r}.")
    if tree is not None and (spans is not None or "mask" in given):
        raise ValueError(
            f"tree says by itself what a token sees, and cannot be combined with "
            f"{'spans' if spans is not None else 'mask'}: leave one out."
        )
    measured = given | {name: x for name, x in {"alibi": alibi, "spans": spans, "tree": tree}.items() if x is not None}
    positional = [name for name in measured if name != "mask"]
    if not causal and positional:
        raise ValueError(
            f"causal=False lets every query see the whole row, and gives it no position to measure {positional[0]} "
            f"from: leave {positional[0]} out, or say what is seen with mask."
        )


def check_stripe(stripe) -> None:
    if stripe is not None and (stripe.dtype != jnp.int32 or stripe.shape != (2,)):
        raise ValueError(
            f"stripe must be i32[2], which of how many runs of every block the pool holds, not "
            f"{stripe.dtype}{list(stripe.shape)}."
        )
