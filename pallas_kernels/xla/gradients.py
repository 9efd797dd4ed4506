"""The gradient of paged attention, in plain XLA, for every backend.

As in FlashAttention (https://arxiv.org/abs/2205.14135) weights are not kept but computed again, tile by tile of the
same work list as in the forward pass, from the logarithm of the softmax's denominator.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.batch import Call
from pallas_kernels.xla import tile_reads, tile_sizes, work_list

_product = functools.partial(jnp.einsum, precision="highest")

# The LSE kept of a token that sees nothing: all weights are 0, and `jax_debug_infs` does not stop at what is kept.
NOTHING_SEEN = float(np.finfo(np.float32).max)


def attention_gradients(out_bar, lse_bar, out, lse, call: Call) -> Call:
    """Returns the cotangents of the floating-point arrays of `paged_attention`'s call, in their shapes and dtypes.

    Args:
      out_bar, lse_bar: the cotangents of the output and of the LSE (None: zero).
      out, lse: what `paged_attention` returned for the call; the LSE is `NOTHING_SEEN` where that is -inf.

    Returns:
      The call with cotangents for arrays, and None for all that has none.

    Rows are read by themselves, also those that are `shared`.
    """
    if (joined := call.stored.join_scales()) is not call.stored:
        found = attention_gradients(out_bar, lse_bar, out, lse, call._replace(stored=joined))
        _, pull = jax.vjp(lambda scale: call.stored.replace(None, scale).join_scales().scale, call.stored.scale)
        return found._replace(stored=call.stored.replace(found.stored.kv, *pull(found.stored.scale)))
    q, stored, options, (kv, kv_scale) = call.q, call.stored, call.options, (call.stored.kv, call.stored.scale)
    format, rank, halves, packed = stored.format, stored.latent_rank, stored.half_rank, stored.is_packed
    soft_cap, sinks, alibi, tables = options.soft_cap, options.sinks, options.alibi, call.batch.block_tables
    arguments = dict(q=q, kv=kv, kv_scale=kv_scale, scale=options.scale, soft_cap=soft_cap, sinks=sinks, alibi=alibi)
    differentiable = {
        name: x for name, x in arguments.items() if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    }

    def bundle(bars: dict[str, jax.Array]) -> Call:
        found = {name: bars[name].astype(x.dtype) for name, x in differentiable.items()}
        numbers = {name: found.get(name) for name in ("scale", "soft_cap", "sinks", "alibi")}
        nothing = jax.tree.map(lambda _: None, call)
        return nothing._replace(
            q=found.get("q"),
            stored=stored.replace(found.get("kv"), found.get("kv_scale")),
            options=dataclasses.replace(nothing.options, **numbers),
        )

    if q.size == 0:
        return bundle({name: jnp.zeros_like(x) for name, x in differentiable.items()})
    *token_axes, num_heads, head_dim = q.shape
    num_tokens, longest = math.prod(token_axes), token_axes[-1]
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    rows = work_list.find_rows(tuple(token_axes), call.batch)
    tile_mask = work_list.find_tile_mask(tuple(token_axes), rows, call.batch, call.mask)

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(num_tokens, *x.shape[len(token_axes) :]).astype(jnp.float32)

    queries, out_bar, out, lse = flat(q), flat(out_bar), flat(out), flat(lse)
    pull_down = (out_bar * out).sum(axis=-1)  # [tokens, H]: how a larger denominator changes the loss
    if lse_bar is not None:
        pull_down -= flat(lse_bar)

    tile_queries = min(tile_sizes.find_sizes().queries, longest)
    lanes = min(tables.shape[0], num_tokens) + num_tokens // tile_queries
    tiling = tile_sizes.choose_tiling(
        queries, kv, tables if tile_mask.blocks is None else tile_mask.blocks, tile_queries, lanes
    )
    work = work_list.plan(tiling, lanes, rows, tile_mask)

    def compute_logits(distance, q, keys, numbers):
        logits = _product("ikqd,ikcd->ikqc", q, keys) * numbers["scale"]
        if soft_cap is not None:
            logits = numbers["soft_cap"] * jnp.tanh(logits / numbers["soft_cap"])
        return tile_reads.add_slopes(logits, numbers.get("alibi"), distance)

    numbers = {"scale": jnp.float32(options.logit_scale(head_dim))}
    if soft_cap is not None:
        numbers["soft_cap"] = jnp.float32(soft_cap)
    if alibi is not None:
        numbers["alibi"] = alibi.astype(jnp.float32).reshape(num_kv_heads, group)

    def step(i, bars):
        items = work_list.find_items(tiling, work, rows, i, tile_mask)
        seen = jnp.repeat(items.seen, group, axis=1)[:, None]  # [items, 1, queries * G, context]
        sees, visible = seen.any(axis=3), seen.any(axis=2)

        def read(x):  # of queries
            x = tile_reads.read_queries(x, items, num_kv_heads)
            return jnp.where(jnp.expand_dims(sees, range(3, x.ndim)), x, 0.0)

        def read_scales(which):
            scales = tile_reads.read_runs(kv_scale, which, items, tiling.run, *kv_scale.shape[4:])
            scales = format.spread_scales(scales, head_dim, halves)
            return jnp.where(visible[..., None], scales, 0.0)

        stored_numbers = tile_reads.read_numbers(stored, items, tiling.run, head_dim)

        def read_stored(which):  # the keys or values as stored, and their scales
            numbers = stored_numbers[which].astype(jnp.float32)
            scales = jnp.ones_like(numbers[..., :1]) if kv_scale is None else read_scales(which)
            return jnp.where(visible[..., None], numbers, 0.0), scales

        keys, key_scales = read_stored(0)
        if rank is None:
            values, value_scales = read_stored(1)
        else:
            values, value_scales = keys[..., :rank], read_scales(1) if packed else key_scales[..., :rank]
        compute = functools.partial(compute_logits, items.distance)
        logits, pull = jax.vjp(compute, read(queries), keys * key_scales, numbers)
        weights = jnp.where(seen, jnp.exp(logits - read(lse)[..., None]), 0.0)
        weights_bar = _product("ikqd,ikcd->ikqc", read(out_bar), values * value_scales)
        queries_bar, keys_bar, numbers_bar = pull(weights * (weights_bar - read(pull_down)[..., None]))
        values_bar = _product("ikqc,ikqd->ikcd", weights, read(out_bar))

        # Tokens that a lane does not have, and places that no query sees, receive zeros.
        split = queries_bar.reshape(tiling.items, num_kv_heads, tiling.queries, group, head_dim)
        tokens_bar = jnp.moveaxis(split, 1, 2).reshape(tiling.items, tiling.queries, num_heads, head_dim)
        bars["q"] = bars["q"].at[items.token].add(tokens_bar, mode="drop")
        bars["numbers"] = jax.tree.map(jnp.add, bars["numbers"], numbers_bar)
        block = jnp.clip(items.block, 0, kv.shape[0] - 1)[:, :, None]
        place = items.offset[:, :, None] + jnp.arange(tiling.run, dtype=jnp.int32)[None, None]
        halves_bar = [(keys, key_scales, keys_bar), (values, value_scales, values_bar)]
        if rank is not None and not packed:  # values are part of the keys
            halves_bar = [(keys, key_scales, keys_bar.at[..., :rank].add(values_bar))]
        for which, (content, scales, bar) in enumerate(halves_bar):

            def add(name, update, which=which):  # [items, K, pieces * run, ...] into the pool's places
                runs = update.reshape(*update.shape[:2], tiling.pieces, tiling.run, *update.shape[3:])
                at = (block, which, slice(None), place) + (slice(0, update.shape[-1]),) * (update.ndim - 3)
                bars[name] = bars[name].at[at].add(jnp.moveaxis(runs, 1, 3))

            if "kv" in bars:
                add("kv", bar * scales)
            if kv_scale is not None:
                add("kv_scale", format.sum_by_scale(bar * content, halves))
        return bars

    bars = {
        "q": jnp.zeros_like(queries),
        "numbers": jax.tree.map(jnp.zeros_like, numbers),
    }
    if "kv" in differentiable:
        bars["kv"] = jnp.zeros(kv.shape, jnp.float32)
    if kv_scale is not None:
        bars["kv_scale"] = jnp.zeros(kv_scale.shape, jnp.float32)
    zero = tile_reads.zero_for(queries, kv, kv_scale, out_bar, rows)
    bars = jax.tree.map(lambda x: x + zero, bars)
    bars = jax.lax.fori_loop(0, tile_sizes.cover(work.num_items, tiling.items), step, bars)
    bars |= bars.pop("numbers")
    bars["q"] = bars["q"].reshape(q.shape)
    if alibi is not None:
        bars["alibi"] = bars["alibi"].reshape(alibi.shape)
    if sinks is not None:
        nothing = lse == NOTHING_SEEN
        share = jnp.where(nothing, 0.0, jnp.exp(sinks.astype(jnp.float32)[None] - jnp.where(nothing, 0.0, lse)))
        bars["sinks"] = -jnp.where(nothing, 0.0, share * pull_down).sum(axis=0)
    return bundle(bars)
