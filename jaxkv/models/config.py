"""The shape of a decoder: everything that tells one family of models from another."""

import dataclasses
from typing import Literal

from jaxkv._core.groups import period_of
from jaxkv._core.numbers import integer, real, shown
from jaxkv.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What `Decoder` is built from; frozen and hashable. `jaxkv.models.load` makes it from a config.json.

    Fields:
      family: the Hugging Face `model_type` that it came from; only `save` reads it.
      embed_dim, mlp_dim: widths of the residual stream and of the gated MLP.
      num_heads, num_kv_heads, head_dim: of every attention layer.
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

    def __post_init__(self):
        for name in ("vocab_size", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim", "max_seq_len"):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=1))
        for name in ("attention_scale", "norm_eps", "norm_offset", "embed_scale"):
            real(name, getattr(self, name), least=0)
        for name in ("attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                real(name, getattr(self, name), above=0)
        for name in ("qk_norm", "post_norms", "qkv_bias", "out_bias", "mlp_bias", "tie_embeddings", "byte_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {shown(getattr(self, name))}.")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation must be 'silu' or 'gelu_tanh', not {shown(self.activation)}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot be shared among {self.num_kv_heads} KV heads: "
                "num_heads must be a multiple of num_kv_heads."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim must be even, so that the rotary embedding can pair its entries, not {self.head_dim}."
            )
        if len(self.windows) != len(self.ropes):
            both = f"{len(self.windows)} and {len(self.ropes)}"
            raise ValueError(f"windows and ropes must have one entry per layer, but they have {both}.")

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def period(self) -> int:
        """After how many layers their kinds repeat themselves; the last time may end early."""
        return period_of(list(zip(self.windows, self.ropes, strict=True)))
