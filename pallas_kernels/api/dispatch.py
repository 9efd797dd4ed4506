"""The front door of attention and writes: gathers the arguments of a call, checks them, and has it run."""

import dataclasses
import inspect
from collections.abc import Collection, Set

from pallas_kernels.api.arguments import (
    POOL,
    check_attention,
    check_format,
    check_new,
    check_new_scale,
    check_pool,
    refuse_gradients,
)
from pallas_kernels.api.attention_dispatch import attend, choose_checked, differentiable, write, write_then_attend
from pallas_kernels.api.backends import (
    IMPLEMENTATIONS,
    Choice,
    check_implementation,
    current_platform,
    find_platform,
    list_kernels,
    read_platform,
    unsupported,
)
from pallas_kernels.api.mixers import explain_mixer
from pallas_kernels.api.selection import explain_selection
from pallas_kernels.api.show import show
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.common.state_batch import MIXERS


def paged_attention(
    q,
    kv,
    tables,
    lengths,
    new,
    *,
    offsets=None,
    kv_scale=None,
    kind=None,
    rank=None,
    scale=None,
    soft_cap=None,
    window=None,
    sinks=None,
    mask=None,
    return_lse=False,
    alibi=None,
    spans=None,
    tree=None,
    causal=True,
    chunk=None,
    blocks=None,
    deterministic=False,
    sink_tokens=None,
    shared=None,
    stripe=None,
    tokens=None,
    residual_length=None,
    compress_ratio=None,
    implementation=None,
):
    """Causal attention of a step's tokens over the blocks of their rows.

    Query t of row s is at position `lengths[s] - new[s] + t` and sees the keys at positions 0 to its own. Softmax and
    accumulation are in float32. Blocks that a row does not own, slots past its length and unused table entries
    have no effect, NaN included. Padding gives output 0, and so does a token that sees nothing.

    `lengths[s]` may be less than `new[s]`, down to 0, where a row's last tokens are read elsewhere: a query at a
    negative position sees nothing. That is undefined with `tree` or `spans`, which refer to the step's own tokens.

    Args:
      q: queries, `[S, T, H, D]` padded or `[N, H, D]` packed (see `offsets`).
      kv: one layer's pool, `[num_blocks + 1, 2, K, block_size, D']`: keys at 0, values at 1; D' may be padded beyond D.
        `H` must be a multiple of `K`: query heads `h * H // K` and on share KV head `h`.
      tables: `i32[S, M]`, the physical block of each logical block.
      lengths: `i32[S]`, tokens of each row, this step's included.
      new: `i32[S]`, how many of them are this step's.
      offsets: `i32[S]`, non-decreasing, where each row's packed tokens start; default: `cumsum(new) - new`.
      kv_scale: `[num_blocks + 1, 2, K, block_size]`, the scales of a quantized pool; for "int4"
        with one more axis of `ceil(D / 32)`, for "k5v3" of `ceil(D / 64)`.
      kind: the storage format of a quantized pool: "int8", "float8_e4m3fn", "float8_e5m2", "int4" or
        "k5v3"; see `pallas_kernels.common.quantization`. None: not quantized.
      rank: the pool is one of latent rows, `[num_blocks + 1, 1, K, block_size, D']`, of which the first `rank` numbers
        are the values too; then `scale` must be given, and the output is `[..., H, rank]`. Its `kv_scale` is
        `[num_blocks + 1, 1, K, block_size, 2]`, one scale for those numbers and one for the others; or, of rows whose
        keys stand behind the values, where queries are 0, `[num_blocks + 1, 2, K, block_size]`: what a row is
        multiplied by as keys, and what as values; for "int4" with one more axis of `ceil(rank / 32)`, for "k5v3" of
        `ceil(rank / 64)`.
      scale: the factor of the logits, a float or a scalar array; default `D ** -0.5`.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; after `scale`.
      window: a token sees only the last `window` positions, its own included.
      sink_tokens: with `window`, a token also sees this number of first positions of its row (StreamingLLM,
        https://arxiv.org/abs/2309.17453); blocks between are not read.
      sinks: `f32[H]`, one more logit per head in the softmax's denominator, without a value.
      mask: `bool[S, T, C]` padded or `bool[N, C]` packed, and-ed with causality: may the token see position c?
        Positions from C on are not seen.
      alibi: `f32[H]`, slopes: each logit is lowered by the slope times the distance of the positions, after `soft_cap`.
      spans: `i32[S, T]` or `i32[N]`: tokens of one row and one step with the same number see each other,
        regardless of order, window and chunk. 0: none. `mask` is and-ed after that. Kernels for TPU and GPU support
        contiguous spans; else XLA runs.
      tree: `i32[S, T]` or `i32[N]`, each token's parent, counted from the row's first token of the step; anything but
        an earlier one is the context. A token sees the context, its ancestors and itself, and its position is that of
        the context's end plus its depth: it gets what it would get if only its ancestors were there.
      causal: False: every query sees all tokens of the row, and `new` counts queries (cross-attention).
      blocks: `i32[S, n]`: read only these logical blocks of each row, in increasing order, padded with -1 at the end.
      chunk: a token at position p sees positions from `p // chunk * chunk` on. Not with `window`.
      deterministic: in one layout, dtype and implementation, a row's output and LSE are the same to the bit for any
        other rows, table width, T and block numbers, and for a prompt in one step or in pieces of two tokens or more
        (kernels for TPU: without a window). A single token is computed as a decode step, in any batch. Gradients are
        not the same to the bit. Kernels take no spans with it.
      shared: `i32[4, S]`, what `find_shared` found in these tables: rows that begin with the same blocks read them
        once. With `blocks`, `sink_tokens` and `deterministic` every row is read by itself, in kernels for TPU and GPU
        also with `window` and `chunk`.
      stripe: `i32[2]`, (number, count): of every block the pool holds one of `count` equal runs of tokens, this one;
        `block_size` in `kv` is a run's. The result is the attention over these tokens alone, for `merge_attention`.
        Decode steps in which a token sees its whole row run in any backend, others in XLA.
      tokens: `i32[S, T, n]` or `i32[N, n]`: each token sees these positions of its row and no others, each once. A
        position that it would not see otherwise is ignored, as is -1. Work and bytes go by n, not by the context. Not
        with `mask`, `spans`, `tree` or `blocks`. XLA gathers the rows of each query for kernels.
      residual_length: each token attends as if its row ended so many tokens earlier, and the token stood there: to all
        but the newest, which are read elsewhere and merged by `merge_attention`. `window` is counted from there. A
        token that sees nothing gets 0, and an LSE of -inf. Not with `tree`, `spans`, `tokens`, `blocks`, `chunk` or
        `causal=False`.
      compress_ratio: keys are entries, each made of so many tokens of a row, as layers that compress store them
        (DeepSeek-V4): entry j is seen from position `(j + 1) * compress_ratio - 1` on. `lengths` and `new` count tokens
        as ever; blocks, and `tokens`, hold and name entries. Kernels for TPU and GPU take steps of one token a row;
        else XLA runs. Only with `tokens`, `sinks`, `soft_cap`, `causal` and `deterministic`.
      return_lse: also return the natural logarithm of the softmax's denominator, its sink included.
      implementation: None picks the kernels of the platform, and falls back to XLA; a name raises if it cannot.

    Returns:
      The output in `q`'s shape and dtype; with `return_lse` also `f32[S, T, H]` or `f32[N, H]`, -inf where nothing is
      seen. Reverse-mode gradients go to `q`, `kv`, `kv_scale`, `sinks`, `alibi`, and to `scale`, `soft_cap` if arrays.

    Raises:
      ValueError: shapes, dtypes or options that do not fit together.
      NotImplementedError: the named implementation does not support the arguments; the sentence says why.

    The layout of blocks follows vLLM's PagedAttention (https://arxiv.org/abs/2309.06180), latent rows are those of
    DeepSeek-V2 (https://arxiv.org/abs/2405.04434), slopes those of ALiBi (https://arxiv.org/abs/2108.12409), trees
    those of SpecInfer (https://arxiv.org/abs/2305.09781), chunks Llama 4's.

    >>> from pallas_kernels import testing
    >>> case = testing.Case(lengths=(5, 17), new=(1, 1))
    >>> out, lse = paged_attention(*testing.make_inputs(case), return_lse=True)
    >>> out.shape, lse.shape
    ((2, 1, 4, 64), (2, 1, 4))
    """
    call = bundle_call(
        q=q,
        kv=kv,
        tables=tables,
        lengths=lengths,
        new=new,
        offsets=offsets,
        kv_scale=kv_scale,
        kind=kind,
        rank=rank,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        sinks=sinks,
        mask=mask,
        return_lse=return_lse,
        alibi=alibi,
        spans=spans,
        tree=tree,
        causal=causal,
        chunk=chunk,
        blocks=blocks,
        deterministic=deterministic,
        sink_tokens=sink_tokens,
        shared=shared,
        stripe=stripe,
        tokens=tokens,
        residual_length=residual_length,
        compress_ratio=compress_ratio,
    )
    check_pool(call, ("q", *POOL))
    check_format(call.stored, q.shape[-1])
    check_attention(call)
    return attend(implementation, call)


def write_kv(
    kv,
    k,
    v,
    tables,
    lengths,
    new,
    *,
    offsets=None,
    kv_scale=None,
    kind=None,
    rank=None,
    stripe=None,
    implementation=None,
):
    """Stores a step's keys and values in the blocks of their rows.

    A token without a slot is not stored, and no other token is changed by it: padding; a token at a position outside
    its row's table, from `M * block_size` on or negative; and one whose table entry is no reserved block, but 0 (the
    null block), negative or past the pool. What queries of such a row attend to is undefined.

    Args:
      kv: one layer's pool, `[num_blocks + 1, 2, K, block_size, D']`. Donated at the `jit`, it is updated in place.
      k, v: `[S, T, K, D]` padded or `[N, K, D]` packed, cast to the pool's dtype; of latent rows v is None.
      tables, lengths, new, offsets, kv_scale, kind, rank, stripe, implementation: as for `paged_attention`; the tables
        must already hold the blocks. Of a pool with a stripe of them, what belongs to others is not written.

    Returns:
      The pool; with `kind` `(kv, kv_scale)`.

    Raises:
      ValueError, NotImplementedError: as `paged_attention`.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import testing
    >>> _, kv, *tables = testing.make_inputs(testing.Case(lengths=(5, 17), new=(1, 1)))
    >>> k = jnp.ones((2, 1, kv.shape[2], kv.shape[-1]), kv.dtype)
    >>> write_kv(kv, k, k, *tables).shape == kv.shape
    True
    """
    call = bundle_call(
        k=k,
        v=v,
        kv=kv,
        tables=tables,
        lengths=lengths,
        new=new,
        offsets=offsets,
        kv_scale=None if kind is None else kv_scale,
        kind=kind,
        rank=rank,
        stripe=stripe,
    )
    check_pool(call, ("k", *POOL))
    check_format(call.stored, k.shape[-1])
    check_new_scale(kv_scale, kind)
    check_new(k, v, call.stored, tables.shape[0])
    return write(implementation, refuse_gradients(call)).pools


def write_and_attend(
    q,
    k,
    v,
    kv,
    tables,
    lengths,
    new,
    *,
    offsets=None,
    kv_scale=None,
    kind=None,
    rank=None,
    scale=None,
    soft_cap=None,
    window=None,
    sinks=None,
    mask=None,
    return_lse=False,
    implementation=None,
    **variants,
):
    """`write_kv`, then `paged_attention` over the result; in one kernel where a backend has one.

    Args:
      **variants: `alibi`, `spans`, `tree`, `causal`, `chunk`, `blocks`, `deterministic`, `sink_tokens`, `shared`,
        `stripe`, `tokens` and `residual_length`; all arguments are as in those two.

    Returns:
      `(out, kv)`, where out is what `paged_attention` returns, and kv what `write_kv` does.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import testing
    >>> q, kv, *tables = testing.make_inputs(testing.Case(lengths=(5, 17), new=(1, 1)))
    >>> k = jnp.ones((2, 1, kv.shape[2], kv.shape[-1]), kv.dtype)
    >>> out, kv = write_and_attend(q, k, k, kv, *tables)
    >>> out.shape
    (2, 1, 4, 64)
    """
    check_names("write_and_attend", variants)
    call = bundle_call(
        q=q,
        k=k,
        v=v,
        kv=kv,
        tables=tables,
        lengths=lengths,
        new=new,
        offsets=offsets,
        kv_scale=None if kind is None else kv_scale,
        kind=kind,
        rank=rank,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        sinks=sinks,
        mask=mask,
        return_lse=return_lse,
        **variants,
    )
    check_pool(call, ("q", "k", *POOL))
    check_format(call.stored, q.shape[-1])
    check_new_scale(kv_scale, kind)
    check_new(k, v, call.stored, tables.shape[0])
    check_attention(call)
    call = refuse_gradients(call)
    check_implementation(implementation)
    able = [implementation] if implementation else list_kernels(current_platform())
    if call.mask.residual_length is not None and call.options.shared is not None:
        able = []  # what rows share is read for them together by a call of its own
    if any(unsupported(name, "write_and_attend", call) is None for name in able if name in IMPLEMENTATIONS):
        out, written = differentiable("write_and_attend", implementation, call)
    else:
        out, written = write_then_attend(implementation, call)
    return out, written.pools


def explain(
    op: str = "paged_attention", *, platform: str | None = None, implementation: str | None = None, **arguments
) -> Choice:
    """Which implementation `op` picks for these arguments, and why.

    Args:
      op: "paged_attention", "write_kv", "write_and_attend", "causal_conv", "gated_delta_rule" or "state_space"; or
        "select_tokens", the choice of `jaxkv.scores.indexer`: its `q`, `keys`, `tables`, `top_k`, and `kind` of keys.
      platform: "cpu", "cuda" or "tpu"; default: that of the devices on which the arguments say that they lie, else the
        one that a program traced now would be lowered for.
      implementation: as for `paged_attention`.
      **arguments: the op's arguments, by name; of arrays only shapes and dtypes are read.

    Raises:
      TypeError: an argument that no op takes.
      ValueError: a platform that there is not, shapes or options that do not fit together.
      NotImplementedError: the named implementation cannot run these arguments.

    >>> import jax, jax.numpy as jnp
    >>> q, kv = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((9, 2, 2, 16, 64), jnp.bfloat16)
    >>> explain(q=q, kv=kv, tables=jax.ShapeDtypeStruct((2, 4), jnp.int32), platform="cpu").implementation
    'xla'
    """
    if isinstance(op, str) and op in MIXERS:
        return explain_mixer(op, platform=platform, implementation=implementation, **arguments)
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(f"op must be one of {', '.join((*OPS, *MIXERS))}, not {show(op)}.")
    if op == "select_tokens":
        check_names(op, arguments, SELECTED)
        return explain_selection(platform=platform, implementation=implementation, **arguments)
    check_names(op, arguments)
    call = bundle_call(**arguments)
    platform = find_platform(call.q, call.stored.kv) if platform is None else read_platform(platform)
    if call.q is not None and call.stored.kv is not None and call.batch.block_tables is not None:
        options = call.options
        if call.stored.latent_rank is not None and options.scale is None:  # which has no say in who runs
            options = dataclasses.replace(options, scale=1.0)
        check_pool(call, ())
        check_attention(call._replace(options=options))
    return choose_checked(op, platform, implementation, call)


OPS = ("paged_attention", "write_kv", "write_and_attend", "select_tokens")
TAKEN = {name for f in (paged_attention, write_kv) for name in inspect.signature(f).parameters} - {"implementation"}
SELECTED = {"q", "keys", "tables", "top_k", "kind", "stripe"}  # arguments of `explain_selection`


def check_names(op: str, names: Collection[str], taken: Set[str] = TAKEN, beside: Set[str] = frozenset()) -> None:
    """Raise TypeError for arguments that are not `taken`, by default by any op; `beside` is named with these."""
    unknown = sorted(set(names) - taken)
    if "bias" in unknown:
        raise TypeError(
            f"{op} takes no bias: a slope by distance is alibi=, one more logit per head sinks=, True and False mask=."
        )
    if unknown:
        raise TypeError(f"{op} takes no {' and no '.join(unknown)}: it takes {', '.join(sorted(taken | beside))}.")
