"""The attention of DeepSeek V4: one row a token is the key and the value of all heads. A layer sees a window of tokens,
and beside it entries of several tokens each."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv._core.attention.attention import attend, attention
from jaxkv._core.attention.compress import compress
from jaxkv._core.attention.index import choose_tokens
from jaxkv._core.attention.plan import Step
from jaxkv._core.attention.write import write
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._layers import attend_or_dense, dense_attention
from jaxkv._products import product_by_heads
from jaxkv.models.blocks.compressor import (
    Compressor,
    EntryParts,
    combine_tokens,
    find_windows,
    rotate_last,
    split_windows,
)
from jaxkv.models.blocks.indexer import IndexInputs, choose_densely, mask_chosen
from jaxkv.models.blocks.norms import normalize
from jaxkv.models.config import CompressedConfig, CompressorConfig, DecoderConfig, IndexConfig
from jaxkv.models.layers import norm_weight, rms_norm
from jaxkv.models.rope import Rope
from jaxkv.nnx import project
from pallas_kernels.common.merge import merge_attention


class ChoiceInputs(NamedTuple):
    """What an indexer makes of the step's tokens."""

    q: jax.Array  # [.., heads, dim]
    weights: jax.Array  # f32[.., heads]
    parts: EntryParts  # of its keys of entries


class CompressedInputs(NamedTuple):
    """What attention makes of the step's tokens."""

    q: jax.Array  # [.., H, D]
    row: jax.Array  # [.., 1, D]: key and value
    sinks: jax.Array  # f32[H]
    positions: jax.Array  # i32[..], by which outputs are rotated back
    parts: EntryParts | None = None  # of entries
    choice: ChoiceInputs | None = None


class EntryIndexer(nnx.Module):
    """Chooses entries by keys that are entries too, as the indexer of DeepSeek sparse attention chooses tokens.

    Shapes: E inputs, Q the rank of compressed queries. `query [heads, dim, Q]`, `weights [heads, E]`.
    """

    def __init__(
        self, config: DecoderConfig, own: CompressedConfig, found: CompressorConfig, dtype: Any, rngs: nnx.Rngs
    ):
        def weight(*shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), shape, dtype))

        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        assert found.index is not None
        self.index: IndexConfig = found.index
        self.query = weight(self.index.heads, self.index.dim, own.query_rank)
        self.weights = weight(self.index.heads, config.embed_dim)
        self.compressor = Compressor(config, found, self.index.dim, dtype, rngs)

    def __call__(
        self, x: jax.Array, queries: jax.Array, rope: Rope, rope_dim: int, positions: jax.Array
    ) -> ChoiceInputs:
        index, q = self.index, project("...q,hdq->...hd", queries, self.query)
        q, _ = rotate_last(lambda q, k: rope(q, k, positions), rope_dim, q, q)
        weights = project("...e,he->...h", x, self.weights).astype(jnp.float32) * (index.heads * index.dim) ** -0.5
        return ChoiceInputs(q, weights, self.compressor(x, positions))


class CompressedAttention(nnx.Module):
    """Attention whose keys are its values, rotated in their last numbers; outputs are rotated back there, so that they
    tell how far a value is from its query. With a compressor it sees entries of several tokens beside its window.

    Shapes: E inputs, H heads of D entries, Q the rank of queries, G groups of heads with outputs of rank R.
    `query_down [Q, E]`, `query_up [H, D, Q]`, `key_down [D, E]`, `sinks [H]`, `out_down [G, R, H / G * D]`,
    `out_up [E, G * R]`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        own: CompressedConfig,
        compressor: CompressorConfig | None,
        layer: LayerConfig,
        rope: Rope,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        def weight(num_inputs: int, *outputs: int) -> nnx.Param:
            kernel = nnx.initializers.lecun_normal()(rngs.params(), (num_inputs, math.prod(outputs)), dtype)
            return nnx.Param(kernel.T.reshape(*outputs, num_inputs))

        heads, head_dim, width = config.num_heads, layer.head_dim, config.embed_dim
        self.config, self.own, self.rope, self.window = config, own, rope, layer.window
        self.query_down, self.query_norm = weight(width, own.query_rank), norm_weight(config, own.query_rank, dtype)
        self.query_up = weight(own.query_rank, heads, head_dim)
        self.key_down, self.key_norm = weight(width, head_dim), norm_weight(config, head_dim, dtype)
        self.sinks = nnx.Param(jnp.zeros((heads,), dtype))
        self.out_down = weight(heads // own.out_groups * head_dim, own.out_groups, own.out_rank)
        self.out_up = weight(own.out_dim, width)
        self.entries = compressor
        self.compressor = None if compressor is None else Compressor(config, compressor, head_dim, dtype, rngs)
        self.indexer = (
            None
            if compressor is None or compressor.index is None
            else EntryIndexer(config, own, compressor, dtype, rngs)
        )

    def inputs(self, x: jax.Array, positions: jax.Array) -> CompressedInputs:
        compressed = rms_norm(project("...e,qe->...q", x, self.query_down), self.query_norm, self.config)
        q = normalize(project("...q,hdq->...hd", compressed, self.query_up), eps=self.config.norm_eps)
        row = rms_norm(project("...e,de->...d", x, self.key_down), self.key_norm, self.config)[..., None, :]
        q, row = rotate_last(lambda q, k: self.rope(q, k, positions), self.own.rope_dim, q, row)
        return CompressedInputs(
            q,
            row,
            self.sinks[...].astype(jnp.float32),
            positions,
            None if self.compressor is None else self.compressor(x, positions),
            None if self.indexer is None else self.indexer(x, compressed, self.rope, self.own.rope_dim, positions),
        )

    def attend(
        self, inputs: CompressedInputs, cache: Any, layer: Any, step: Step | None, deterministic: bool = False
    ) -> tuple[jax.Array, Any]:
        """Stores rows and the entries that they complete, attends, and rotates outputs back. Uses no parameters.

        Args:
          layer: the cache's layer of rows; with a compressor a sequence of three, of rows, of entries, and of what
            entries are made of.
        """
        q, row, sinks, positions, parts, _ = inputs
        options: dict[str, Any] = dict(scale=self.config.attention_scale, window=self.window, sinks=sinks)
        if parts is None:
            v = row if cache is None else None  # in a cache the values are the keys
            y, cache = attend_or_dense(q, row, v, cache, layer, step, deterministic=deterministic, **options)
        elif cache is None:
            y = self._attend_densely(inputs)
        else:
            rows, *of_entries = layer
            options["deterministic"] = deterministic
            near, cache = attention(q, row, None, cache, layer=rows, step=step, return_lse=True, **options)
            far, cache = self._attend_to_entries(inputs, cache, of_entries, step, deterministic)
            y, _ = merge_attention(*(jnp.stack(both) for both in zip(near, far, strict=True)))
        (y,) = rotate_last(lambda x: (self.rope.rotate_back(x, positions),), self.own.rope_dim, y)
        return y, cache

    def output(self, y: jax.Array) -> jax.Array:
        """Projects the outputs of each group of heads, then those of all groups together, to `[..., E]`."""
        by_group = y.reshape(*y.shape[:-2], self.own.out_groups, -1)
        y = product_by_heads(by_group, self.out_down[...].astype(y.dtype), outputs_first=True)
        return project("...f,ef->...e", y.reshape(*y.shape[:-2], -1), self.out_up)

    def _combine(self, parts: EntryParts, k: jax.Array, gate: jax.Array, *windows: jax.Array) -> jax.Array:
        """Returns entries `[n, D]` of the tokens that they are made of, `[n, W, P]`."""
        options: dict[str, Any] = dict(rope=self.rope, rope_dim=self.own.rope_dim, eps=self.config.norm_eps)
        return combine_tokens(k, gate, *windows, norm=parts.norm, **options)

    def _attend_to_entries(
        self, inputs: CompressedInputs, cache: Any, layers: Sequence[Any], step: Step | None, deterministic: bool
    ) -> tuple[tuple[jax.Array, jax.Array], Any]:
        """Stores what the step's tokens complete, and returns attention to entries, with its LSE."""
        q, _, _, _, parts, choice = inputs
        entries, made_of = layers
        assert parts is not None and step is not None
        kinds = [parts] if choice is None else [parts, choice.parts]
        k, gate = (jnp.concatenate([getattr(kind, name) for kind in kinds], axis=-1) for name in ("k", "gate"))
        cache = write(cache, k[..., None, :], gate[..., None, :], layer=made_of, step=step)

        def compute(k: jax.Array, gate: jax.Array, is_token: jax.Array, position: jax.Array) -> tuple:
            cut = parts.k.shape[-1]
            pairs = zip(kinds, (slice(cut), slice(cut, None)), strict=False)
            found = [
                self._combine(kind, k[:, :, 0, own], gate[:, :, 0, own], is_token, position) for kind, own in pairs
            ]
            return found[0][:, None], None, *found[1:]

        cache = compress(cache, compute, layer=entries, inputs=made_of, step=step)
        options: dict[str, Any] = {"scale": self.config.attention_scale, "deterministic": deterministic}
        if choice is not None and (top_k := self._find_top_k(cache.config.max_seq_len)) is not None:
            found, _ = choose_tokens(cache, layer=entries, q=choice.q, weights=choice.weights, top_k=top_k, step=step)
            options["tokens"] = found
        return attend(q, cache, layer=entries, step=step, return_lse=True, **options), cache

    def _find_top_k(self, num_tokens: int) -> int | None:
        """Returns how many entries a token chooses; None where it sees all that so many tokens have."""
        assert self.entries is not None and self.entries.index is not None
        top_k = self.entries.index.top_k
        return top_k if num_tokens // self.entries.ratio > top_k else None

    def _attend_densely(self, inputs: CompressedInputs) -> jax.Array:
        """Computes attention of whole sequences to their windows and entries, in float32."""
        q, row, sinks, _, parts, choice = inputs
        assert parts is not None and self.entries is not None
        num_tokens, front = q.shape[-3], (1,) * (q.ndim - 3)
        token, entry = (jnp.arange(n, dtype=jnp.int32) for n in (num_tokens, num_tokens // self.entries.ratio))
        far = (entry[None] < (token[:, None] + 1) // self.entries.ratio).reshape(*front, num_tokens, -1)
        if choice is not None and (top_k := self._find_top_k(num_tokens)) is not None:
            index = IndexInputs(choice.q, choice.weights, self._make_entries(choice.parts))
            far = mask_chosen(choose_densely(index, far, top_k), entry.size)
        far = jnp.broadcast_to(far, (*q.shape[:-3], *far.shape[-2:]))
        mask = jnp.concatenate([jnp.ones((*far.shape[:-1], num_tokens), bool), far], axis=-1)
        keys = jnp.concatenate([row, self._make_entries(parts).astype(row.dtype)[..., None, :]], axis=-3)
        options: dict[str, Any] = dict(scale=self.config.attention_scale, window=self.window, sinks=sinks)
        return dense_attention(q, keys, keys, mask=mask, **options)

    def _make_entries(self, parts: EntryParts) -> jax.Array:
        """Returns all entries of whole sequences, `f32[.., n, D]`."""
        assert self.entries is not None
        ratio, window = self.entries.ratio, self.entries.window
        *leading, num_tokens, _ = parts.k.shape
        rows, count = math.prod(leading), num_tokens // ratio
        if not count:
            return jnp.zeros((*leading, 0, parts.norm.shape[0]), jnp.float32)
        k, gate = (split_windows(x, ratio, window).reshape(rows * count, window, -1) for x in (parts.k, parts.gate))
        _, is_token = find_windows(num_tokens, ratio, window)
        position = jnp.arange(count, dtype=jnp.int32) * ratio
        found = self._combine(parts, k, gate, jnp.tile(is_token, (rows, 1)), jnp.tile(position, rows))
        return found.reshape(*leading, count, -1)
