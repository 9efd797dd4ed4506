"""The shape of a decoder: everything that tells one family of models from another."""

import dataclasses
from collections.abc import Sequence
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


@dataclasses.dataclass(frozen=True, kw_only=True, init=False)
class DecoderConfig:
    """What `Decoder` is built from; frozen and hashable. `jaxkv.models.load` makes it from a config.json.

    Fields:
      family: the Hugging Face `model_type` that it came from; what checkpoints call its parameters follows from it.
      embed_dim, mlp_dim: widths of the residual stream and of the gated MLP.
      num_heads: query heads of every attention layer.
      layers: what each layer's attention keeps: its KV heads, their width, its window.
      latent: attention is over latent rows instead, and `layers` are `LayerConfig.latent`.
      experts: in layers where `expert_layers` says so, what stands in the place of the MLP.
      sinks: one learned logit per head in the softmax's denominator.
      max_seq_len: how many positions the model was trained for.
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

    Args:
      num_kv_heads, head_dim, windows: in the place of `layers`, where layers differ in nothing but their windows: each
        layer's KV heads, their width (with `latent` both follow from it), and for each layer of how many last positions
        a token sees, or None for all. Beside `layers` they are changed in all of those, as `dataclasses.replace` does.
      **fields: the fields above.

    >>> import jaxkv.models
    >>> config = jaxkv.models.small().config
    >>> config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
    (5, 4, 2, 32)
    >>> config.layers[0].num_kv_heads, config.layers[0].window
    (2, None)
    """

    family: str = "llama"
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    layers: tuple[LayerConfig, ...]
    max_seq_len: int
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

    def __init__(
        self, *, layers: Sequence[LayerConfig] = (), num_kv_heads: int | None = None, head_dim: int | None = None,
        windows: Sequence[int | None] | None = None, **fields: Any,
    ):  # fmt: skip
        values: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(self)} | fields
        if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(self)}):
            raise TypeError(f"DecoderConfig has no {', '.join(unknown)}.")
        values["layers"] = _make_layers(tuple(layers), values["latent"], num_kv_heads, head_dim, windows)
        if missing := [name for name, value in values.items() if value is dataclasses.MISSING]:
            raise TypeError(f"DecoderConfig lacks {', '.join(missing)}.")
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name in ("vocab_size", "embed_dim", "mlp_dim", "num_heads", "max_seq_len"):
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
        for layer in self.layers if self.latent is None else ():
            if self.num_heads % layer.num_kv_heads:
                raise ValueError(
                    f"{self.num_heads} query heads cannot be shared among {layer.num_kv_heads} KV heads: "
                    "num_heads must be a multiple of num_kv_heads."
                )
            if layer.head_dim % 2:
                raise ValueError(
                    f"head_dim must be even, so that the rotary embedding can pair its entries, not {layer.head_dim}."
                )
        if len(self.layers) != len(self.ropes):
            both = f"{len(self.layers)} and {len(self.ropes)}"
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
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window; None: it has none."""
        return tuple(layer.window for layer in self.layers)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the first layer; with latent attention as many as there are query heads."""
        return self.num_heads if self.latent is not None else self.layers[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Entries of a head's query in the first layer."""
        return self.layers[0].head_dim if self.latent is None else self.latent.nope_dim + self.latent.rope_dim

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """For each layer what makes it differ from others, hashable."""
        experts = self.expert_layers or (False,) * self.num_layers
        return tuple(zip(self.layers, self.ropes, experts, strict=True))

    @property
    def period(self) -> int:
        """After how many layers their kinds repeat themselves; the last time may end early."""
        return period_of(self.layer_kinds)

    @property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """What each layer keeps, for `CacheConfig`."""
        return self.layers


def _make_layers(
    layers: tuple[LayerConfig, ...], latent: LatentConfig | None, num_kv_heads: int | None, head_dim: int | None,
    windows: Sequence[int | None] | None,
) -> tuple[LayerConfig, ...]:  # fmt: skip
    """Returns a `LayerConfig` for each layer, made from what they have in common or changed by it."""
    if not layers and latent is not None:
        return tuple(LayerConfig.latent(latent.rank, latent.rope_dim, window=window) for window in windows or ())
    shape: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim} if latent is None else {}
    if not layers:
        if missing := [name for name, value in (shape | {"windows": windows}).items() if value is None]:
            raise TypeError(f"DecoderConfig lacks layers, or in their place {', '.join(missing)}.")
        return tuple(LayerConfig(**shape, window=window) for window in windows or ())
    changes: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    layers = tuple(dataclasses.replace(layer, **changes) for layer in layers)
    if windows is None:
        return layers
    alike = layers if len(layers) == len(windows) else layers[:1] * len(windows)
    return tuple(dataclasses.replace(layer, window=window) for layer, window in zip(alike, windows, strict=True))
