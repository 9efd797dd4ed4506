"""What a decoder's blocks have: attention, a mixer that keeps a state, or both; the configs of mixers."""

import dataclasses
from typing import Any, Literal

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import flag, integer, real, show
from jaxkv.models.blocks.part_configs import CompressorConfig
from pallas_kernels.common.channel_groups import group_channels

Shapes = dict[str, tuple[int, ...] | None]  # of parameters, by name; None: there is no such parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """A gated delta net (https://arxiv.org/abs/2412.06464), or Kimi delta attention (https://arxiv.org/abs/2510.26692).

    Fields:
      key_heads, value_heads: heads of queries and keys, and of values and states; the former divide the latter.
      key_dim, value_dim: entries of a head.
      width: tokens that each convolution sees.
      gate_rank: rank of the projections to a decay for each key channel and to the output gate, as in Kimi Linear;
        None: a decay for each head, and a plain projection to the gate.
      gate: the function of the output gate.
      beta_scale: factor of the sigmoid that says how much of a value is learned; 2 allows negative eigenvalues.
      norm_eps: epsilon of the output norm.

    >>> DeltaConfig(key_heads=1, value_heads=2, key_dim=4, value_dim=8, width=4).layer("bfloat16")
    LayerConfig.recurrent(conv=((24, 3), 'bfloat16'), state=((2, 4, 8), 'float32'))
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    gate_rank: int | None = None
    gate: Literal["silu", "sigmoid"] = "silu"
    beta_scale: float = 1.0
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_sizes(self, "key_heads", "value_heads", "key_dim", "value_dim", width=2)
        if self.gate_rank is not None:
            check_sizes(self, "gate_rank")
        real("beta_scale", self.beta_scale, above=0)
        real("norm_eps", self.norm_eps, least=0)
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} heads of values cannot be shared among {self.key_heads} heads of keys: the number "
                "must be a multiple."
            )

    @property
    def key_channels(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    def layer(self, dtype: Any = "float32") -> LayerConfig:
        """Returns what a cache keeps of a row: the last inputs of the convolutions in `dtype`, and the state."""
        conv = group_channels(2 * self.key_channels + self.value_channels, self.width - 1), dtype
        return LayerConfig.recurrent(conv=conv, state=((self.value_heads, self.key_dim, self.value_dim), "float32"))

    def shapes(self, width: int) -> Shapes:
        """Returns the shapes of the mixer's parameters in a residual stream of a width."""
        keys, values, rank = self.key_channels, self.value_channels, self.gate_rank
        decays = self.value_heads * (self.key_dim if rank else 1)
        return {
            "query": (keys, width), "key": (keys, width), "value": (values, width),
            "query_conv": (keys, self.width), "key_conv": (keys, self.width), "value_conv": (values, self.width),
            "decay_down": (rank, width) if rank else None, "decay": (decays, rank or width), "decay_bias": (decays,),
            "log_decay": (self.value_heads,), "beta": (self.value_heads, width),
            "gate_down": (rank, width) if rank else None, "gate": (values, rank or width),
            "norm": (self.value_dim,), "out": (values, width),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """A gated short convolution, as in LFM2 (https://arxiv.org/abs/2511.23404), on as many channels as the stream has.

    Fields:
      channels: channels of the convolution.
      width: tokens that it sees.
      bias: whether the projections and the convolution have biases.

    >>> ShortConvConfig(channels=8, width=3).layer()
    LayerConfig.recurrent(conv=((8, 2), 'float32'))
    """

    channels: int
    width: int
    bias: bool = False

    def __post_init__(self):
        check_sizes(self, "channels", width=2)
        object.__setattr__(self, "bias", flag("ShortConvConfig.bias", self.bias))

    def layer(self, dtype: Any = "float32") -> LayerConfig:
        """Returns what a cache keeps of a row: the last inputs of the convolution."""
        return LayerConfig.recurrent(conv=(group_channels(self.channels, self.width - 1), dtype))

    def shapes(self, width: int) -> Shapes:
        """Returns the shapes of the mixer's parameters in a residual stream of a width."""
        n = self.channels
        biases: Shapes = {"project_bias": (3 * n,), "conv_bias": (n,), "out_bias": (width,)}
        return {"project": (3 * n, width), "conv": (n, self.width), "out": (n, width)} | (
            biases if self.bias else dict.fromkeys(biases)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpaceConfig:
    """A selective state space, Mamba 2 (https://arxiv.org/abs/2405.21060).

    Fields:
      heads, head_dim: heads of inputs and states, and entries of an input.
      state_dim, groups: entries of a state for each entry of an input; heads of a group share what they are read by.
      width: tokens that the convolution sees.
      bias, conv_bias, out_bias: whether the projection of the input, the convolution, and the projection of the output
        have biases.
      norm: whether an RMS norm over each group comes after the output gate, or before it, or not at all.
      norm_eps: epsilon of that norm.
      step_limits: the least and the largest time step; None: no largest.
      input_scale, output_scale: factors of the mixer's input and output.
      part_scales: factors of the projections to the gate, the inputs, what writes and reads states, and time steps.

    >>> SpaceConfig(heads=2, head_dim=4, state_dim=8, groups=1, width=4).layer("bfloat16")
    LayerConfig.recurrent(conv=((24, 3), 'bfloat16'), state=((2, 4, 8), 'float32'))
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    width: int
    bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    norm_eps: float = 1e-5
    step_limits: tuple[float, float | None] = (0.0, None)
    input_scale: float = 1.0
    output_scale: float = 1.0
    part_scales: tuple[float, ...] = (1.0,) * 5

    def __post_init__(self):
        check_sizes(self, "heads", "head_dim", "state_dim", "groups", width=2)
        for name in ("bias", "conv_bias", "out_bias"):
            object.__setattr__(self, name, flag(f"SpaceConfig.{name}", getattr(self, name)))
        real("norm_eps", self.norm_eps, least=0)
        if self.heads % self.groups:
            raise ValueError(
                f"{self.heads} heads cannot be divided into {self.groups} groups: give a number of groups that divides "
                "that of heads."
            )
        if self.norm not in ("after_gate", "before_gate", None):
            raise ValueError(f"norm must be 'after_gate', 'before_gate' or None, not {show(self.norm)}.")

    @property
    def channels(self) -> int:
        """Channels of the inputs, and of the outputs."""
        return self.heads * self.head_dim

    @property
    def projection_sizes(self) -> tuple[int, ...]:
        """Channels of the projections to the gate, the inputs, what writes and reads states, and time steps."""
        states = self.groups * self.state_dim
        return self.channels, self.channels, states, states, self.heads

    def layer(self, dtype: Any = "float32") -> LayerConfig:
        """Returns what a cache keeps of a row: the last inputs of the convolution in `dtype`, and the state."""
        conv = group_channels(sum(self.projection_sizes[1:4]), self.width - 1), dtype
        return LayerConfig.recurrent(conv=conv, state=((self.heads, self.head_dim, self.state_dim), "float32"))

    def shapes(self, width: int) -> Shapes:
        """Returns the shapes of the mixer's parameters in a residual stream of a width."""
        convolved, every = sum(self.projection_sizes[1:4]), sum(self.projection_sizes)
        return {
            "project": (every, width), "project_bias": (every,) if self.bias else None,
            "conv": (convolved, self.width), "conv_bias": (convolved,) if self.conv_bias else None,
            "log_decay": (self.heads,), "step_bias": (self.heads,), "skip": (self.heads,),
            "norm": None if self.norm is None else (self.channels,),
            "out": (self.channels, width), "out_bias": (width,) if self.out_bias else None,
        }  # fmt: skip


Mixer = DeltaConfig | ShortConvConfig | SpaceConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What a block has. With both attention and a mixer, they stand side by side.

    Fields:
      mixer, attention: what comes first; by default attention where there is no mixer.
      mlp: whether an MLP or experts follow. mlp_dim: width of that MLP; default: the config's.
      num_heads: query heads; default: the config's.
      sinks: whether attention has the config's sinks; default: what the config says.
      post_norms: whether norms follow, as with the config's `post_norms`; default: what the config says, and without a
        mixer.
      gate_sparsity: share of the MLP's gates that are 0, were they distributed normally.
      values_are_keys: values are keys before their norm and rotation; there is no projection of values.
      compressor: of attention to entries of several tokens, beside its window.
      hash_experts: experts are chosen by a table of token ids, and only weighted by their scores.

    >>> BlockConfig(mixer=DeltaConfig(key_heads=1, value_heads=1, key_dim=2, value_dim=2, width=2)).attention
    False
    """

    mixer: Mixer | None = None
    attention: bool | None = None
    mlp: bool = True
    mlp_dim: int | None = None
    num_heads: int | None = None
    sinks: bool | None = None
    post_norms: bool | None = None
    gate_sparsity: float = 0.0
    values_are_keys: bool = False
    compressor: CompressorConfig | None = None
    hash_experts: bool = False

    def __post_init__(self):
        if self.attention is None:
            object.__setattr__(self, "attention", self.mixer is None)
        if self.num_heads is not None:
            check_sizes(self, "num_heads")

    @property
    def num_layers(self) -> int:
        """Layers of a cache that the block has: attention's first, then those of entries, then the mixer's."""
        return int(bool(self.attention)) + 2 * int(self.compressor is not None) + int(self.mixer is not None)

    def layers(self, attention: LayerConfig, dtype: Any = "float32") -> tuple[LayerConfig, ...]:
        """Returns the block's layers, of which `attention` is attention's."""
        own: tuple[LayerConfig, ...] = (attention,) if self.attention else ()
        own += () if self.compressor is None else self.compressor.layers(attention)
        return own if self.mixer is None else (*own, self.mixer.layer(dtype))


ATTENTION = BlockConfig()


def check_blocks(blocks: tuple[BlockConfig, ...], num_layers: int) -> None:
    """Raises ValueError unless each of `num_layers` layers of a cache belongs to a block, and one has attention."""
    if wrong := [block for block in blocks if not isinstance(block, BlockConfig)]:
        raise ValueError(f"blocks must be BlockConfigs, not {show(wrong[0])}.")
    if sum(block.num_layers for block in blocks) != num_layers:
        raise ValueError(f"blocks have {sum(block.num_layers for block in blocks)} layers, but layers {num_layers}.")
    if not any(block.attention for block in blocks):
        raise ValueError("At least one block must have attention: its block tables count the tokens of rows.")


def check_sizes(config: Any, *names: str, **least: int) -> None:
    """Makes fields integers. Raises ValueError for one below its least value, by default 1."""
    for name in (*names, *least):
        object.__setattr__(config, name, integer(name, getattr(config, name), least=least.get(name, 1)))
