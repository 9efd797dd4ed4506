"""The configuration of a decoder: everything that differs between model families."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.layer_groups import find_period
from jaxkv._core.config.validation import integer, real, show
from jaxkv.models.blocks.part_configs import (
    CompressedConfig as CompressedConfig,
    CompressorConfig as CompressorConfig,
    ExpertsConfig as ExpertsConfig,
    HyperConfig as HyperConfig,
    IndexConfig as IndexConfig,
    LatentConfig as LatentConfig,
    PerLayerConfig as PerLayerConfig,
    StreamsConfig as StreamsConfig,
)
from jaxkv.models.mixers.block_config import ATTENTION, BlockConfig, check_blocks
from jaxkv.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True, init=False)
class DecoderConfig:
    """Configuration of a `Decoder`; frozen and hashable. `jaxkv.models.load` makes it from a config.json.

    Fields:
      family: the Hugging Face `model_type`, which determines the parameter names in checkpoints.
      embed_dim, mlp_dim: widths of the residual stream and of the gated MLP.
      num_heads: query heads of every attention layer whose block says no other number.
      layers: cache config of each layer: its KV heads, their width, its window.
      blocks: what each block has, where that is not attention and an MLP in all; see `BlockConfig`. `layers` are then
        those of all blocks, one after another. A block with a mixer has norms before and none after.
      latent: latent attention instead; `layers` are then `LayerConfig.latent`.
      index: the indexers of layers that attend to chosen tokens, beside latent attention; layers with `index_dim` have
        one, and the first layer must.
      compressed: the attention of DeepSeek V4 instead; `layers` are then `LayerConfig.latent(head_dim, 0)`.
      experts: experts in place of the MLP, in the layers that `expert_layers` selects.
      sinks: one learned logit per head in the softmax's denominator.
      value_norm: an RMS norm, without weights, of each head's values.
      per_layer: embeddings of their own for each layer, which gates at its end add to the residual stream.
      streams: several residual streams. With a `StreamsConfig` each layer computes one and predicts the others, and
        `per_layer` then adds to the others; with a `HyperConfig` each part of a block reads and writes all.
      layer_scale: multiply the residual stream behind each layer by a learned number.
      max_seq_len: number of positions that the model was trained for.
      ropes: each layer's rotary embedding.
      attention_scale: factor of the attention logits.
      attention_soft_cap, logit_soft_cap: c in `c * tanh(x / c)`, on the attention's and on the final logits.
      norm_eps: epsilon of every RMS norm.
      norm_offset: added to a norm's weight before scaling (Gemma stores weights around 0, not 1).
      qk_norm: RMS norms on queries and keys.
      qk_norm_over: what each of them normalises: a "head" before its rotation, a "rotated_head", or "all_heads" of a
        token together, before the rotation.
      pre_norms: norms before attention and before the MLP.
      post_norms: also norms after attention and after the MLP, before they are added to the residual stream.
      residual_scale: factor of attention's and the MLP's outputs, before they are added to the residual stream.
      logit_divisor: divides the final logits.
      qkv_bias, out_bias, mlp_bias: whether these projections have biases.
      attention_gate: attention's outputs are multiplied by a function of a projection of the token.
      attention_gate_by, attention_gate_activation: whether each "entry" of a head's output has a gate of its own, or
        each "head"; and the function.
      activation: of the MLP, and of experts; "xielu", with learned numbers, of MLPs alone.
      gated_mlp: MLPs and experts are `down(activation(gate(x)) * up(x))`; else `down(activation(up(x)))`.
      mlp_scales: factors of the MLP's gate, before the activation, and of its output.
      attention_scales: factors of attention's input, of its keys, and of its output.
      embed_scale: factor of the embeddings.
      tie_embeddings: the output head is the embedding table.
      bos_id, eos_ids: the tokens that begin and that end a text.
      byte_tokens: token t below 256 is the byte t, so no tokenizer is needed.

    Args:
      num_kv_heads, head_dim, windows: instead of `layers`, where layers differ only in their windows: KV heads of each
        layer, their width (`latent` determines both), and each layer's sliding window, or None. Given together with
        `layers`, they replace the values in all of those, as `dataclasses.replace` does.
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
    qk_norm_over: Literal["head", "rotated_head", "all_heads"] = "head"
    pre_norms: bool = True
    post_norms: bool = False
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2", "xielu"] = "silu"
    gated_mlp: bool = True
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    attention_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    byte_tokens: bool = False
    latent: LatentConfig | None = None
    index: IndexConfig | None = None
    compressed: CompressedConfig | None = None
    experts: ExpertsConfig | None = None
    expert_layers: tuple[bool, ...] = ()
    sinks: bool = False
    attention_gate: bool = False
    attention_gate_by: Literal["entry", "head"] = "entry"
    attention_gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    value_norm: bool = False
    per_layer: PerLayerConfig | None = None
    streams: StreamsConfig | HyperConfig | None = None
    layer_scale: bool = False
    blocks: tuple[BlockConfig, ...] = ()

    def __init__(
        self,
        *,
        layers: Sequence[LayerConfig] = (),
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        windows: Sequence[int | None] | None = None,
        **fields: Any,
    ):
        values: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(self)} | fields
        if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(self)}):
            raise TypeError(f"DecoderConfig has no {', '.join(unknown)}.")
        blocks = values["blocks"] = tuple(values["blocks"])
        if blocks and not layers and windows is None:  # one for each block, and the mixers' beside them
            windows = (None,) * len(blocks)
            each = _make_layers((), values["latent"], num_kv_heads, head_dim, windows)
            layers = [layer for block, own in zip(blocks, each, strict=True) for layer in block.layers(own)]
            values["layers"] = tuple(layers)
        else:
            values["layers"] = _make_layers(tuple(layers), values["latent"], num_kv_heads, head_dim, windows)
        if missing := [name for name, value in values.items() if value is dataclasses.MISSING]:
            raise TypeError(f"DecoderConfig lacks {', '.join(missing)}.")
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name in ("vocab_size", "embed_dim", "mlp_dim", "num_heads", "max_seq_len"):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=1))
        for name in ("attention_scale", "norm_eps", "norm_offset", "embed_scale", "residual_scale"):
            real(name, getattr(self, name), least=0)
        real("logit_divisor", self.logit_divisor, above=0)
        for name in ("attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                real(name, getattr(self, name), above=0)
        flags = (
            "qk_norm",
            "pre_norms",
            "post_norms",
            "qkv_bias",
            "out_bias",
            "mlp_bias",
            "tie_embeddings",
            "byte_tokens",
            "sinks",
            "attention_gate",
            "value_norm",
            "layer_scale",
            "gated_mlp",
        )
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {show(getattr(self, name))}.")
        if self.activation not in ("silu", "gelu_tanh", "relu2", "xielu"):
            known = "'silu', 'gelu_tanh', 'relu2' or 'xielu'"
            raise ValueError(f"activation must be {known}, not {show(self.activation)}.")
        if self.activation == "xielu" and (self.experts or self.per_layer):
            raise ValueError("activation 'xielu' is of MLPs alone: there are no experts and no per_layer with it.")
        if self.qk_norm_over not in ("head", "rotated_head", "all_heads"):
            known = "'head', 'rotated_head' or 'all_heads'"
            raise ValueError(f"qk_norm_over must be {known}, not {show(self.qk_norm_over)}.")
        gates = {"attention_gate_by": ("entry", "head"), "attention_gate_activation": ("sigmoid", "softplus")}
        for name, (first, second) in gates.items():
            if getattr(self, name) not in (first, second):
                raise ValueError(f"{name} must be {first!r} or {second!r}, not {show(getattr(self, name))}.")
        if self.blocks:
            check_blocks(self.blocks, len(self.layers))
        if self.latent is not None and {*self.query_heads} != {self.num_heads}:
            raise ValueError("Latent attention has the same number of query heads in all blocks.")
        pairs = zip(self.query_heads, self.attention_layers, strict=True) if self.latent is None else ()
        for num_heads, layer in pairs:
            if num_heads % layer.num_kv_heads:
                raise ValueError(
                    f"{num_heads} query heads cannot be shared among {layer.num_kv_heads} KV heads: "
                    "num_heads must be a multiple of num_kv_heads."
                )
            if layer.head_dim % 2:
                raise ValueError(
                    f"head_dim must be even, so that the rotary embedding can pair its entries, not {layer.head_dim}."
                )
        if self.num_layers != len(self.ropes):
            both = f"{self.num_layers} and {len(self.ropes)}"
            raise ValueError(f"windows and ropes must have one entry per layer, but they have {both}.")
        if len(self.expert_layers) != (self.num_layers if self.experts else 0):
            raise ValueError(
                f"expert_layers must have one entry for each of {self.num_layers} layers where there are experts, and "
                f"none where there are not, but it has {len(self.expert_layers)}."
            )
        self._check_index()
        self._check_compressed()
        if isinstance(self.streams, HyperConfig) and (self.per_layer or self.layer_scale):
            raise ValueError("Hyper-connections have no per_layer and no layer_scale beside them: leave those out.")
        hashing = [i for i in range(self.num_layers) if self.block(i).hash_experts]
        if any(not self.experts or not self.expert_layers[i] for i in hashing) or (
            hashing and self.experts and self.experts.scores == "softmax_of_chosen"
        ):
            raise ValueError(
                f"Blocks {', '.join(map(str, hashing))} have hash_experts, which need experts in these layers, whose "
                'scores are others than "softmax_of_chosen".'
            )
        if self.latent is not None and any(window is not None for window in self.windows):
            raise ValueError("Latent attention has no windows here.")

    def _check_compressed(self) -> None:
        own = self.compressed
        compressors = [block.compressor for block in self.blocks if block.compressor is not None]
        if own is None:
            if compressors:
                raise ValueError("Blocks with a compressor need compressed=, the config of their attention.")
            return
        if wrong := [layer for layer in self.attention_layers if layer.rank != layer.head_dim]:
            raise ValueError(
                f"With compressed= the layers are LayerConfig.latent(head_dim, 0), whose rank is their head_dim, not "
                f"{wrong[0]}."
            )
        if self.num_heads % own.out_groups or own.rope_dim > self.head_dim:
            raise ValueError(
                f"{self.num_heads} query heads cannot lie in {own.out_groups} groups, or {own.rope_dim} entries of "
                f"{self.head_dim} be rotated: out_groups must divide num_heads, and rope_dim be at most head_dim."
            )
        for index in (found.index for found in compressors):
            if index is not None and index.dim < own.rope_dim:
                raise ValueError(
                    f"index.dim must be at least rope_dim, {own.rope_dim}, as so many entries of it rotate, not "
                    f"{index.dim}."
                )

    def _check_index(self) -> None:
        widths = [layer.index_dim for layer in self.attention_layers]
        if self.index is None:
            if any(width is not None for width in widths):
                raise ValueError("Layers with index_dim need index=, the config of their indexers.")
            return
        if self.latent is None or self.latent.query_rank is None or self.latent.rope_dim > self.index.dim:
            raise ValueError(
                "Indexers stand beside latent attention whose queries have a query_rank, and are at least as wide as "
                f"its rope_dim, but latent is {self.latent} and index.dim {self.index.dim}."
            )
        if widths[0] is None or {*widths} - {None, self.index.dim}:
            raise ValueError(
                f"Layers with an indexer have index_dim={self.index.dim}, and the first layer has one, not {widths}."
            )

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks or self.layers)

    def block(self, i: int) -> BlockConfig:
        """Returns what a block has."""
        return self.blocks[i] if self.blocks else ATTENTION

    def count_heads(self, i: int) -> int:
        """Returns the query heads of a block's attention."""
        return self.block(i).num_heads or self.num_heads

    def has_sinks(self, i: int) -> bool:
        """Tells whether a block's attention has sinks."""
        own = self.block(i).sinks
        return self.sinks if own is None else own

    def find_norms(self, i: int) -> tuple[bool, bool]:
        """Tells whether norms come before the parts of a block, and whether they come behind."""
        block = self.block(i)
        has_mixer = block.mixer is not None
        behind = self.post_norms and not has_mixer if block.post_norms is None else block.post_norms
        return self.pre_norms or has_mixer, behind

    def first_layer(self, i: int) -> int:
        """Returns the index in `layers` of a block's first layer."""
        return sum(block.num_layers for block in self.blocks[:i]) if self.blocks else i

    @property
    def query_heads(self) -> tuple[int, ...]:
        """Query heads of each attention layer."""
        return tuple(self.count_heads(i) for i in range(self.num_layers) if self.block(i).attention)

    @property
    def attention_layers(self) -> tuple[LayerConfig, ...]:
        """The layers of attention, without those of entries of several tokens beside it."""
        blocks = (i for i in range(self.num_layers) if self.block(i).attention)
        return tuple(self.layers[self.first_layer(i)] for i in blocks)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each attention layer's sliding window, or None."""
        return tuple(layer.window for layer in self.attention_layers)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the first attention layer; where all heads read one row, the number of query heads."""
        reads_rows = self.latent is not None or self.compressed is not None
        return self.num_heads if reads_rows else self.attention_layers[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Entries of a head's query in the first attention layer."""
        if self.latent is not None:
            return self.latent.nope_dim + self.latent.rope_dim
        return self.attention_layers[0].head_dim

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """For each layer a hashable value of everything in which layers may differ."""
        experts = self.expert_layers or (False,) * self.num_layers
        blocks = [self.block(i) for i in range(self.num_layers)]
        firsts = (self.first_layer(i) for i in range(self.num_layers))
        layers = (self.layers[i : i + block.num_layers] for i, block in zip(firsts, blocks, strict=True))
        # Embeddings of one layer are no other's.
        numbers = range(self.num_layers) if self.per_layer else (0,) * self.num_layers
        return tuple(zip(blocks, layers, self.ropes, experts, numbers, strict=True))

    @property
    def period(self) -> int:
        """Number of layers after which their kinds repeat; the last period may be incomplete."""
        return find_period(self.layer_kinds)

    @property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """Cache config of each layer, for `CacheConfig`."""
        return self.layers

    def layers_in(self, dtype: Any) -> tuple[LayerConfig, ...]:
        """Returns the layers of a cache for a decoder in `dtype`, in which mixers keep their convolutions' inputs."""
        found = list(self.layers)
        for i, block in enumerate(self.blocks):
            if block.mixer is not None:
                found[self.first_layer(i) + block.num_layers - 1] = block.mixer.layer(dtype)
        return tuple(found)


def _make_layers(
    layers: tuple[LayerConfig, ...],
    latent: LatentConfig | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    windows: Sequence[int | None] | None,
) -> tuple[LayerConfig, ...]:
    """Returns a `LayerConfig` for each layer, made from the common values or updated with them."""
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
