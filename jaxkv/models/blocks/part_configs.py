"""The configs of a decoder's parts that not all families have."""

import dataclasses
from typing import Literal

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import integer, real, show

Shapes = dict[tuple[str, ...], tuple[int, ...] | None]  # by path as in a `Decoder`; None: there is no such parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention (MLA), as in DeepSeek.

    Fields:
      rank, rope_dim: sizes of a latent row's two fields: the compressed keys and values, and a rotated key.
      nope_dim, value_dim: sizes of the unrotated entries of a head's key, and of its value.
      query_rank: rank of the compressed queries; None: queries are projected from the token itself.

    >>> LatentConfig(rank=512, rope_dim=64, nope_dim=128, value_dim=128).width
    576
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None

    def __post_init__(self):
        for name in ("rank", "rope_dim", "nope_dim", "value_dim", "query_rank"):
            if name != "query_rank" or self.query_rank is not None:
                object.__setattr__(self, name, integer(name, getattr(self, name), least=1))
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim must be even, so that its entries can be paired, not {self.rope_dim}.")

    @property
    def width(self) -> int:
        """Entries of a latent row."""
        return self.rank + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedConfig:
    """The attention of DeepSeek V4: one row a token is the key and the value of all heads, in a layer of the cache that
    is `LayerConfig.latent(head_dim, 0)`; groups of heads have an output projection of low rank each.

    Fields:
      rope_dim: the last entries of a head, which are rotated, and of its output, which are rotated back.
      query_rank: rank of the compressed queries.
      out_groups, out_rank: groups of heads, and the rank of each group's output.

    >>> CompressedConfig(rope_dim=64, query_rank=1024, out_groups=8, out_rank=1024).out_dim
    8192
    """

    rope_dim: int
    query_rank: int
    out_groups: int
    out_rank: int

    def __post_init__(self):
        for name in ("rope_dim", "query_rank", "out_groups", "out_rank"):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=1))
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim must be even, so that its entries can be paired, not {self.rope_dim}.")

    @property
    def out_dim(self) -> int:
        """Entries of all groups' outputs."""
        return self.out_groups * self.out_rank

    def shapes(self, width: int, heads: int, head_dim: int) -> Shapes:
        """Returns the shapes of the parameters of an attention in a residual stream of a width."""
        return {
            ("query_down",): (self.query_rank, width), ("query_norm",): (self.query_rank,),
            ("query_up",): (heads, head_dim, self.query_rank),
            ("key_down",): (head_dim, width), ("key_norm",): (head_dim,), ("sinks",): (heads,),
            ("out_down",): (self.out_groups, self.out_rank, heads // self.out_groups * head_dim),
            ("out_up",): (width, self.out_dim),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressorConfig:
    """Entries of several tokens each, which a block with `compressed` attends to beside its window.

    Fields:
      ratio: tokens of an entry.
      overlaps: 2: an entry is made of the tokens of the one before, too; 1: of its own alone.
      index: the indexer by which a token chooses its entries; None: it attends to all.

    >>> CompressorConfig(ratio=4, overlaps=2).window
    8
    """

    ratio: int
    overlaps: int = 1
    index: "IndexConfig | None" = None

    def __post_init__(self):
        object.__setattr__(self, "ratio", integer("ratio", self.ratio, least=2))
        object.__setattr__(self, "overlaps", integer("overlaps", self.overlaps, least=1, most=2))

    @property
    def window(self) -> int:
        """Tokens that an entry is made of."""
        return self.overlaps * self.ratio

    def layers(self, attention: LayerConfig) -> tuple[LayerConfig, LayerConfig]:
        """Returns the layers of a cache for the entries of a block, and for what they are made of."""
        index_dim = None if self.index is None else self.index.dim
        entries = attention.replace(window=None, compress_ratio=self.ratio, index_dim=index_dim)
        width = self.overlaps * (attention.head_dim + (index_dim or 0))
        return entries, LayerConfig(num_kv_heads=1, head_dim=width, window=self.window, dtype="float32")

    def shapes(self, width: int, head_dim: int, query_rank: int) -> "Shapes":
        """Returns the shapes of the parameters of a compressor, and of an indexer, in a residual stream of a width."""
        index = self.index
        found = {("compressor", *path): shape for path, shape in self._compressor(width, head_dim).items()}
        if index is not None:
            compressor = self._compressor(width, index.dim)
            found |= {("indexer", "compressor", *path): shape for path, shape in compressor.items()}
            found[("indexer", "query")] = (index.heads, index.dim, query_rank)
            found[("indexer", "weights")] = (index.heads, width)
        return found

    def _compressor(self, width: int, dim: int) -> "Shapes":
        both = self.overlaps * dim
        return {
            ("key",): (both, width), ("gate",): (both, width), ("norm",): (dim,),
            ("position_bias",): (self.ratio, both),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The indexers of layers that choose their tokens, beside latent attention (DeepSeek sparse attention).

    A layer whose `LayerConfig` has `index_dim` has an indexer; others attend to what the last one before them chose.

    Fields:
      heads, dim: heads of an indexer's queries, and their entries, of which the first `rope_dim` are rotated.
      top_k: number of tokens that a token attends to.
      interleaved: whether rotated pairs are neighbours, as in `Rope`.

    >>> IndexConfig(heads=64, dim=128, top_k=2048).top_k
    2048
    """

    heads: int
    dim: int
    top_k: int
    interleaved: bool = False

    def __post_init__(self):
        for name in ("heads", "dim", "top_k"):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a layer, and how tokens are routed to them.

    Fields:
      count, per_token: number of experts, and of experts chosen for each token.
      mlp_dim: hidden width of one expert.
      scores: from the logits: a softmax over all experts, or over the chosen ones, or of each a sigmoid or the square
        root of a softplus.
      normalise: divide the chosen experts' scores by their sum; then `scale` multiplies them.
      groups, groups_per_token: number of expert groups, and of the groups among which a token is routed. A group is
        rated by its best expert, or with a sigmoid by the sum of its best two.
      bias: router and experts have biases. choice_bias: a further bias for each expert that affects the choice alone;
        it is added to scores, or with `choose_by` "logits" to those.
      logit_soft_cap: c in `c * tanh(x / c)`, on the logits.
      shared_dim: hidden width of an MLP that also processes all tokens; 0: none.
      weigh_inputs: multiply an expert's input by the token's weight, not its output.
      shared_gate: multiply that MLP's output by the sigmoid of a projection of the token to one number.
      beside_mlp: the experts stand beside the block's MLP, not in its place. Both have a norm behind, before they are
        added up; the experts and the router have norms of their own before; and a learned factor of each expert
        multiplies its weight (Gemma 4).
      post_norm: an RMS norm of what the experts and that MLP add up to.
      latent_dim: width of what the experts read and write, between a projection before and one behind all of them; 0:
        the residual stream's.
      limit, alpha: with a limit, gates are clipped from above and `up` to `[-limit, limit]`, and the output is
        `down((up + 1) * gate * sigmoid(alpha * gate))`. alpha None: it is as without a limit, and so is that of the
        MLP of all tokens, clipped too.

    >>> ExpertsConfig(count=32, per_token=4, mlp_dim=2880).scores
    'softmax'
    """

    count: int
    per_token: int
    mlp_dim: int
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    bias: bool = False
    choice_bias: bool = False
    choose_by: Literal["scores", "logits"] = "scores"
    logit_soft_cap: float | None = None
    weigh_inputs: bool = False
    shared_dim: int = 0
    shared_gate: bool = False
    beside_mlp: bool = False
    post_norm: bool = False
    latent_dim: int = 0
    limit: float | None = None
    alpha: float | None = 1.702

    def __post_init__(self):
        for name in ("count", "per_token", "mlp_dim", "groups", "groups_per_token"):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=1))
        integer("shared_dim", self.shared_dim, least=0)
        integer("latent_dim", self.latent_dim, least=0)
        real("scale", self.scale, above=0)
        for name in ("limit", "alpha", "logit_soft_cap"):
            if getattr(self, name) is not None:
                real(name, getattr(self, name), above=0)
        if self.choose_by not in ("scores", "logits"):
            raise ValueError(f"choose_by must be 'scores' or 'logits', not {show(self.choose_by)}.")
        size, least = self.count // self.groups, 2 if self.scores == "sigmoid" and self.groups > 1 else 1
        if self.count % self.groups or size < least or self.groups_per_token > self.groups:
            raise ValueError(
                f"{self.count} experts cannot lie in {self.groups} groups of {least} or more, of which a token goes to "
                f"{self.groups_per_token}."
            )
        if self.per_token > size * self.groups_per_token:
            raise ValueError(
                f"A token cannot go to {self.per_token} experts where {size * self.groups_per_token} are within its "
                "reach."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerConfig:
    """Embeddings of their own for each layer (Gemma 3n and 4): of `dim` entries, from a table of `vocab_size` tokens.

    >>> PerLayerConfig(dim=256, vocab_size=262_144).dim
    256
    """

    dim: int
    vocab_size: int

    def __post_init__(self):
        for name in ("dim", "vocab_size"):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """Alternating updates (AltUp, https://arxiv.org/abs/2301.13310) with LAuReL residuals, as in Gemma 3n.

    Fields:
      count, active: number of residual streams, and the one that layers compute.
      rank: of the low-rank map that is added beside attention.
      scales: whether a learned weight multiplies the active stream, before `per_layer` reads it.

    >>> StreamsConfig(count=4, active=0, rank=64).scales
    True
    """

    count: int
    active: int
    rank: int
    scales: bool = True

    def __post_init__(self):
        for name, least in (("count", 2), ("active", 0), ("rank", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=least))
        if self.active >= self.count:
            raise ValueError(f"active must be one of the {self.count} streams, from 0, not {self.active}.")

    def outer_shapes(self, width: int) -> Shapes:
        """Returns the shapes of the parameters outside the blocks, in residual streams of a width."""
        matrices = (self.count - 1, width, width)
        return {("project",): matrices, ("merge",): matrices}

    def block_shapes(self, width: int) -> Shapes:
        """Returns the shapes of a block's parameters."""
        count, rank, norm = self.count, self.rank, (width,)
        return {
            ("router",): (count, width), ("predict",): (count**2, count), ("correct",): (count, count),
            ("left",): (rank, width), ("right",): (width, rank), ("router_norm",): norm, ("low_rank_norm",): norm,
            ("active_scale",): norm if self.scales else None,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConfig:
    """Manifold-constrained hyper-connections (mHC, https://arxiv.org/abs/2512.24880): residual streams that attention
    and the MLP each read a mixture of, write to, and mix among themselves, as in DeepSeek V4.

    Fields:
      count: number of residual streams.
      iterations: of Sinkhorn and Knopp's, which make the matrix that mixes them doubly stochastic.
      eps: added to what it divides by, and to what the streams are read by.

    >>> HyperConfig(count=4).num_weights
    24
    """

    count: int
    iterations: int = 20
    eps: float = 1e-6

    def __post_init__(self):
        for name, least in (("count", 2), ("iterations", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=least))
        real("eps", self.eps, least=0)

    @property
    def num_weights(self) -> int:
        """Weights of a token in one connection: to read, to write and to mix the streams."""
        return self.count * (self.count + 2)

    def outer_shapes(self, width: int) -> Shapes:
        """Returns the shapes of the parameters outside the blocks, in residual streams of a width."""
        return {("mix",): (self.count, self.count * width), ("base",): (self.count,), ("scale",): (1,)}

    def block_shapes(self, width: int) -> Shapes:
        """Returns the shapes of a block's parameters."""
        own = {"mix": (self.num_weights, self.count * width), "base": (self.num_weights,), "scale": (3,)}
        return {
            (connection, name): shape
            for connection in ("attention_connection", "mlp_connection")
            for name, shape in own.items()
        }
