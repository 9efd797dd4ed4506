"""One decoder for all families of `jaxkv.models.families`: the config holds all differences."""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv._core.attention.plan import Step, plan_step, settle_cache
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import show
from jaxkv._layers import token_positions
from jaxkv._products import product
from jaxkv.models.blocks.block import Block, OneOf, stack_blocks
from jaxkv.models.blocks.block_tokens import BlockTokens
from jaxkv.models.blocks.hyper import HyperBlock, HyperStreams
from jaxkv.models.blocks.indexer import ChosenTokens
from jaxkv.models.blocks.per_layer import PerLayerEmbed
from jaxkv.models.blocks.shared_attention import KeptKeys
from jaxkv.models.blocks.streams import Streams, StreamsBlock
from jaxkv.models.config import DecoderConfig, HyperConfig, StreamsConfig
from jaxkv.models.layers import norm_weight, rms_norm

Scan = bool | Literal["stacked", "apart"]
# Of each kind of several residual streams what makes and joins them, and a block.
STREAMS: dict[type, tuple[Any, type[Block]]] = {
    StreamsConfig: (Streams, StreamsBlock), HyperConfig: (HyperStreams, HyperBlock),
}  # fmt: skip


class Decoder(nnx.Module):
    """A causal language model that keeps its keys and values in a paged cache.

    Args:
      config: its configuration.
      dtype: of parameters and computation; norms, rotations, softmax and logits are always in float32.
      scan: compute the layers in a `jax.lax.scan` over the periods in which they repeat. "stacked": stacks the
        parameters of equal layers, so that a deep model's program is as small, and compiles as fast, as that of one
        period. A TPU reads stacked parameters in place; on a CPU and on NVIDIA GPUs, XLA copies a layer's parameters
        before each product, which slows steps of few tokens. "apart": leaves the parameters apart, copies nothing, and
        compiles only attention once for all layers, which on a CPU is most of the compile time; a GPU would wait for
        the host in every layer. True: "apart" on a CPU, else "stacked".
      rngs: the source of the parameters' randomness.

    Pass it to `jax.jit` as an argument, like any pytree:

    >>> import jax, jax.numpy as jnp, jaxkv, jaxkv.models
    >>> model = jaxkv.models.small()
    >>> @jax.jit
    ... def step(model, tokens, num_tokens, cache):
    ...     cache = jaxkv.extend(cache, num_tokens)
    ...     return model(tokens, cache=cache)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=64, num_blocks=8))
    >>> tokens = jnp.array([list(b"import"), list(b"def f(")])
    >>> logits, cache = step(model, tokens, jnp.array([6, 6]), cache)
    >>> chr(jnp.argmax(logits[0, -1]))
    ' '
    """

    def __init__(self, config: DecoderConfig, *, dtype: Any = jnp.float32, scan: Scan = False, rngs: nnx.Rngs):
        if not isinstance(scan, bool | str) or scan not in (False, True, "stacked", "apart"):
            raise ValueError(f'scan must be True, False, "stacked" or "apart", not {show(scan)}.')
        self.config = config
        stacked = scan == "stacked" or (scan != "apart" and jax.default_backend() != "cpu")
        # Chosen tokens go from layer to layer, and a mixer's own parameters act between what `OneOf` has of each block.
        has_mixers = any(block.mixer is not None for block in config.blocks)
        one_by_one = config.index is not None or (has_mixers and not stacked)
        self.periods = config.num_layers // config.period if scan and not one_by_one else 1
        self.scan = self.periods > 1  # a single period has nothing to scan over
        table = (config.vocab_size, config.embed_dim)
        init = nnx.initializers.normal(config.embed_dim**-0.5)
        self.embed = nnx.Param(init(rngs.params(), table, dtype))
        streams, kind = STREAMS.get(type(config.streams), (None, Block))
        blocks = [kind(config, i, dtype, rngs) for i in range(config.num_layers)]
        # For each index in the period the layers of all periods, stacked; and the layers that are not stacked.
        self.num_stacked = self.num_scanned if stacked else 0
        places = range(config.period if self.num_stacked else 0)
        self.stacks = nnx.List([stack_blocks(blocks[j : self.num_stacked : config.period]) for j in places])
        self.layers = nnx.List(blocks[self.num_stacked :])
        self.norm = norm_weight(config, config.embed_dim, dtype)
        self.head = None if config.tie_embeddings else nnx.Param(init(rngs.params(), table, dtype))
        self.streams = streams(config, config.streams, dtype, rngs) if streams else None
        self.layer_embed = PerLayerEmbed(config, config.per_layer, dtype, rngs) if config.per_layer else None

    IS_CHECKED = True  # an engine need not trace it to see that it is a `jaxkv.Model`

    @overload
    def __call__(
        self,
        tokens: jax.Array,
        cache: Cache,
        *,
        logits_at: jax.Array | None = None,
        step: Step | None = None,
        deterministic: bool = False,
    ) -> tuple[jax.Array, Cache]: ...

    @overload
    def __call__(
        self,
        tokens: jax.Array,
        cache: None = None,
        *,
        logits_at: jax.Array | None = None,
        step: Step | None = None,
        deterministic: bool = False,
    ) -> tuple[jax.Array, None]: ...

    def __call__(
        self,
        tokens: jax.Array,
        cache: Cache | None = None,
        *,
        logits_at: jax.Array | None = None,
        step: Step | None = None,
        deterministic: bool = False,
    ) -> tuple[jax.Array, Cache | None]:
        """Computes the next-token logits of each token.

        Args:
          tokens: `i32[S, T]` padded or `i32[N]` packed. Padding may hold anything: ids out of range read as the nearest
            valid one.
          cache: a cache that `jaxkv.extend` has prepared for these tokens. None: each row of `[S, T]`, or all of `[T]`,
            is one whole sequence, attended densely.
          logits_at: the tokens whose logits are wanted: `i32[S]`, one index into each padded row, or `i32[M]` of packed
            tokens. A prompt needs only its last token's; with a large vocabulary the logits of all take much memory.
          step: the result of `jaxkv.plan_step` for this step; by default computed here.
          deterministic: with a cache, that of `jaxkv.attention` in every layer.

        Returns:
          `(logits, cache)`, logits `f32[S, T, V]` or `f32[N, V]`, or with `logits_at` `f32[S, V]` or `f32[M, V]`.
        """
        config = self.config
        if getattr(tokens, "ndim", 0) not in (1, 2) or not jnp.issubdtype(tokens.dtype, jnp.integer):
            what = f"{tokens.dtype}{list(tokens.shape)}" if hasattr(tokens, "dtype") else show(tokens)
            raise ValueError(f"tokens must be an array, i32[S, T] padded or i32[N] packed, not {what}.")
        if cache is not None and step is None:
            step = plan_step(cache, tokens.shape)
        positions = token_positions(tokens.shape) if step is None else step.positions
        with jax.named_scope("embed"):
            x = jnp.take(self.embed[...], tokens, axis=0, mode="clip")
            x = x * jnp.asarray(config.embed_scale, x.dtype)
            own = None if self.layer_embed is None else self.layer_embed(tokens, x)
            x = x if self.streams is None else self.streams.split(x)
        ids = tokens if any(block.hash_experts for block in config.blocks) else None
        kept: Any = KeptKeys() if cache is None and any(x.shares_with is not None for x in config.layers) else cache
        kept = kept if config.index is None else ChosenTokens(kept, None)
        scanned = self.num_scanned if cache is None or cache.config.stacked else 0  # else layers run one by one
        if scanned:
            x, kept = self._scan(x, positions, cache, step, deterministic, BlockTokens(ids))
        for i in range(scanned, config.num_layers):
            with jax.named_scope(f"layer_{i}"):
                given = BlockTokens(ids, None if own is None else own[..., i, :])
                layers = range(config.first_layer(i), config.first_layer(i + 1))
                x, kept = self._block(i)(x, positions, kept, layers, step, deterministic, given)
        with jax.named_scope("logits"):
            x = x if self.streams is None else self.streams.join(x)
            if logits_at is not None:
                x = x[jnp.arange(x.shape[0]), logits_at] if tokens.ndim == 2 else x[logits_at]
            x = rms_norm(x, self.norm, config)
            table = self.embed if self.head is None else self.head
            logits = product(x, table[...], dtype=jnp.float32)
            if config.logit_divisor != 1:
                logits = logits / config.logit_divisor
            if config.logit_soft_cap is not None:
                logits = config.logit_soft_cap * jnp.tanh(logits / config.logit_soft_cap)
        kept = kept.cache if isinstance(kept, ChosenTokens) else kept
        return logits, None if cache is None else kept

    @property
    def num_scanned(self) -> int:
        """Number of leading layers that are scanned: all but those of an incomplete last period."""
        return self.periods * self.config.period if self.scan else 0

    def _block(self, i: int) -> Block:
        """Returns the i-th layer; copies it if it is stacked."""
        if i >= self.num_stacked:
            return self.layers[i - self.num_stacked]
        number, place = divmod(i, self.config.period)
        return jax.tree.map(lambda leaf: leaf[number], self.stacks[place])

    def _scan(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        step: Step | None,
        deterministic: bool,
        tokens: BlockTokens,
    ) -> tuple:
        """Computes all whole periods of layers. Block tables are constant during a step, and are not carried."""
        size, apart = self.config.period, list(self.layers)
        firsts = [self.config.first_layer(j) for j in range(size + 1)]  # layers of the cache: a block may have several
        if cache is not None:
            assert step is not None
            cache = settle_cache(cache, step.token_axes, step)

        def period(carry: tuple, blocks_and_number: tuple) -> tuple[tuple, None]:
            (x, stored), (blocks, number) = carry, blocks_and_number
            blocks = blocks or [OneOf(apart[j : self.num_scanned : size], number) for j in range(size)]
            for j, block in enumerate(blocks):
                with jax.named_scope(f"layer_{j}_of_{size}"):
                    layers: Any = range(firsts[j], firsts[j + 1])
                    if cache is None:
                        x, _ = block(x, positions, None, layers, None, tokens=tokens)
                        continue
                    repeats = cache.config.period  # of the cache's layers: it may be shorter than the model's
                    periods = number * (firsts[-1] // repeats)
                    layers = [(i % repeats, periods + i // repeats) for i in layers]
                    x, after = block(x, positions, put(stored), layers, step, deterministic, tokens)
                    stored = after.pools, after.states, after.state_slots
            return (x, stored), None

        def put(stored: tuple) -> Cache:
            pools, states, slots = stored
            return cache.replace(pools=pools, states=states, state_slots=slots)  # type: ignore[union-attr]

        numbers = jnp.arange(self.periods, dtype=jnp.int32)
        stored = None if cache is None else (cache.pools, cache.states, cache.state_slots)
        (x, stored), _ = jax.lax.scan(period, (x, stored), (tuple(self.stacks), numbers))
        return x, None if stored is None else put(stored)

    @property
    def dtype(self) -> jnp.dtype:
        return self.embed.dtype

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Number of positions that the model was trained for."""
        return self.config.max_seq_len

    @property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """Cache config of each layer, for `CacheConfig`."""
        return self.config.layers_in(self.dtype)
