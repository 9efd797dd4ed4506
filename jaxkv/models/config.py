"""The shape of a decoder: everything that tells one family of models from another."""

import dataclasses
from typing import Any, Literal

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.layer_groups import period_of
from jaxkv._core.config.validation import integer, real, shown
from jaxkv.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Attention over latent rows, as in DeepSeek.

    Fields:
      rank, rope_dim: what a row holds: so many numbers that keys and values are made from, and a rotated key.
      nope_dim, value_dim: entries of a head's key that are not rotated, and of its value.
      query_rank: queries are made from so many numbers, too; None: from the token itself.

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
        """Of a row."""
        return self.rank + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a layer, and how tokens are routed to them.

    Fields:
      count, per_token: experts, and to how many of them a token goes.
      mlp_dim: of one expert.
      scores: of the logits: a softmax over all, or over the chosen ones, or a sigmoid of each.
      normalise: the chosen ones' scores are divided by their sum; `scale` is what they are multiplied by after that.
      groups, groups_per_token: experts lie in so many groups, and a token is routed within its best ones: by the best
        expert of a group, or with a sigmoid by the sum of the best two.
      bias: router and experts have biases. choice_bias: one more for each expert, which counts in the choice alone.
      shared_dim: of an MLP that all tokens go through besides; 0: there is none.
      limit, alpha: with a limit, gates are at most that and the others at most so far from 0, and a token becomes
        `down((up + 1) * gate * sigmoid(alpha * gate))`.

    >>> ExpertsConfig(count=32, per_token=4, mlp_dim=2880).scores
    'softmax'
    """

    count: int
    per_token: int
    mlp_dim: int
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    bias: bool = False
    choice_bias: bool = False
    shared_dim: int = 0
    limit: float | None = None
    alpha: float = 1.702

    def __post_init__(self):
        for name in ("count", "per_token", "mlp_dim", "groups", "groups_per_token"):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=1))
        integer("shared_dim", self.shared_dim, least=0)
        real("scale", self.scale, above=0)
        real("alpha", self.alpha, above=0)
        if self.limit is not None:
            real("limit", self.limit, above=0)
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
class DecoderConfig:
    """What `Decoder` is built from; frozen and hashable. `jaxkv.models.load` makes it from a config.json.

    Fields:
      family: the Hugging Face `model_type` that it came from; only `save` reads it.
      embed_dim, mlp_dim: widths of the residual stream and of the gated MLP.
      num_heads, num_kv_heads, head_dim: of every attention layer.
      latent: attention is over latent rows instead.
      experts: in layers where `expert_layers` says so, what stands in the place of the MLP.
      sinks: one learned logit per head in the softmax's denominator.
      max_seq_len: how many positions the model was trained for.
      windows: for each layer, of how many last positions a token sees, or None for all; as many as there are layers.
      ropes: each layer's rotary embedding.
      attention_scale: what attention logits are multiplied by.
      attention_soft_cap, logit_soft_cap: c in `c * tanh(x / c)`, on the attention's and on the final logits.
      norm_eps: epsilon of every RMS norm.
      norm_offset: what is added to a norm's weight before it scales (Gemma stores it around 0, not 1).
      qk_norm: RMS norms on each head's queries and keys, before the rotation.
      post_norms: norms after attention and after the MLP too, before their sums with the residual stream.
      qkv_bias, out_bias, mlp_bias: which projections have biases.
      activation: of the gated MLP.
      embed_scale: what embeddings are multiplied by.
      tie_embeddings: the output head is the embedding table.
      bos_id, eos_ids: the tokens that begin and that end a text.
      byte_tokens: token t below 256 is the byte t, so no tokenizer is needed.

    >>> import jaxkv.models
    >>> config = jaxkv.models.small().config
    >>> config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
    (5, 4, 2, 32)
    """

    family: str = "llama"
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    qk_norm: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    byte_tokens: bool = False
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    expert_layers: tuple[bool, ...] = ()
    sinks: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim", "max_seq_len"):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=1))
        for name in ("attention_scale", "norm_eps", "norm_offset", "embed_scale"):
            real(name, getattr(self, name), least=0)
        for name in ("attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                real(name, getattr(self, name), above=0)
        flags = ("qk_norm", "post_norms", "qkv_bias", "out_bias", "mlp_bias", "tie_embeddings", "byte_tokens", "sinks")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {shown(getattr(self, name))}.")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation must be 'silu' or 'gelu_tanh', not {shown(self.activation)}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot be shared among {self.num_kv_heads} KV heads: "
                "num_heads must be a multiple of num_kv_heads."
            )
        if self.head_dim % 2 and self.latent is None:
            raise ValueError(
                f"head_dim must be even, so that the rotary embedding can pair its entries, not {self.head_dim}."
            )
        if len(self.windows) != len(self.ropes):
            both = f"{len(self.windows)} and {len(self.ropes)}"
            raise ValueError(f"windows and ropes must have one entry per layer, but they have {both}.")
        if len(self.expert_layers) != (self.num_layers if self.experts else 0):
            raise ValueError(
                f"expert_layers must have one entry for each of {self.num_layers} layers where there are experts, and "
                f"none where there are not, but it has {len(self.expert_layers)}."
            )
        if self.latent is not None and any(window is not None for window in self.windows):
            raise ValueError("Latent attention has no windows here.")

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def period(self) -> int:
        """After how many layers their kinds repeat themselves; the last time may end early."""
        experts = self.expert_layers or (False,) * self.num_layers
        return period_of(list(zip(self.windows, self.ropes, experts, strict=True)))

    @property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """What each layer keeps, for `CacheConfig`."""
        if self.latent is not None:
            return (LayerConfig.latent(self.latent.rank, self.latent.rope_dim),) * self.num_layers
        shape: dict[str, Any] = dict(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        return tuple(LayerConfig(**shape, window=window) for window in self.windows)
