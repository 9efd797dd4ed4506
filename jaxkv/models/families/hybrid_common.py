"""What hybrid families share: their kinds of layers, and how checkpoints store mixers and gated attention."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, LINEAR, MOST_DIM, MOST_HEADS, Fields
from jaxkv.models.families.family import Section, make_part
from jaxkv.models.mixers.block_config import BlockConfig, DeltaConfig, SpaceConfig

GATED_ATTENTION = {  # rows of a head: its queries, then its gate
    "attention.query": Section("self_attn.q_proj.weight", lambda config, shape: _halves(shape, 0)),
    "attention.gate": Section("self_attn.q_proj.weight", lambda config, shape: _halves(shape, 1)),
}


def read_kinds(fields: Fields, default: list[str], kinds: tuple[str, ...] = (LINEAR, FULL)) -> list[str]:
    """Reads `layer_types`."""
    types = fields.take("layer_types", None) or default
    if not isinstance(types, list) or len(types) != len(default) or not all(x in kinds for x in types):
        raise fields.refuse("layer_types", types, f"one of {', '.join(kinds)} for each of the {len(default)} layers")
    if FULL not in types:
        raise fields.refuse("layer_types", types, f"at least one {FULL}")
    return types


def kinds_of(config: DecoderConfig, linear: str = LINEAR) -> list[str]:
    """Writes what `read_kinds` reads."""
    return [FULL if config.block(i).mixer is None else linear for i in range(config.num_layers)]


def every_fourth(num_layers: int, interval: int = 4) -> list[str]:
    """Returns kinds of layers, each `interval`-th of full attention."""
    return [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]


def read_delta(
    fields: Fields, *, heads: tuple[int, int] = (16, 32), key_dim: int = 128, value_dim: int | None = 128, **values: Any
) -> DeltaConfig:
    """Reads the sizes of a gated delta net. The defaults are Qwen's; a width of values of None is twice that of keys.

    Args:
      heads: of keys, and of values.
      values: other fields of the config.
    """
    key_dim = fields.size("linear_key_head_dim", key_dim, None, most=MOST_DIM) or key_dim
    value_dim = 2 * key_dim if value_dim is None else value_dim
    return make_part(
        DeltaConfig, "delta nets", fields,
        key_heads=fields.size("linear_num_key_heads", heads[0], None, most=MOST_HEADS) or heads[0],
        value_heads=fields.size("linear_num_value_heads", heads[1], None, most=MOST_HEADS) or heads[1],
        key_dim=key_dim, value_dim=fields.size("linear_value_head_dim", value_dim, None, most=MOST_DIM) or value_dim,
        width=fields.size("linear_conv_kernel_dim", 4, least=2, most=MOST_DIM), **values,
    )  # fmt: skip


def render_delta(delta: DeltaConfig | None) -> dict[str, Any]:
    """Writes what `read_delta` reads."""
    return {} if delta is None else {
        "linear_num_key_heads": delta.key_heads, "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim, "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.width,
    }  # fmt: skip


def mix(kinds: list[str], mixer: Any) -> tuple[BlockConfig, ...]:
    """Returns blocks that have attention where their kind says so, and elsewhere a mixer."""
    return tuple(BlockConfig(mixer=None if kind == FULL else mixer) for kind in kinds)


def mixer_of(config: DecoderConfig) -> Any:
    """Returns the config of the first mixer, as all mixers of a model are alike; None: there are none."""
    return next((block.mixer for block in config.blocks if block.mixer is not None), None)


def rows(name: str, sizes: Callable[[Any], tuple[int, ...]], number: int, groups: Callable[[Any], int] | None = None,
         inner: int | None = None) -> Section:  # fmt: skip
    """Returns a parameter of a mixer that is the `number`-th of the slices of `sizes` rows, of all or of each group.

    Args:
      sizes: returns the rows of each slice, given the mixer's config.
      groups: returns the number of groups of rows.
      inner: size of a further axis in the checkpoint, behind the rows.
    """

    def find(config: DecoderConfig, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
        mixer = mixer_of(config)
        count, row_counts = 1 if groups is None else groups(mixer), sizes(mixer)
        start, rest = sum(row_counts[:number]), shape[1:]
        whole = (count * sum(row_counts), *(() if inner is None else (inner,)), *rest)
        return whole, (count, sum(row_counts), *rest), np.s_[:, start : start + row_counts[number]]

    return Section(name, find)


def conv_rows(name: str, sizes: Callable[[Any], tuple[int, ...]], number: int) -> Section:
    """Returns the kernels of some channels, `[channels, 1, width]` in the checkpoint."""
    return rows(name, sizes, number, inner=1)


def _halves(shape: tuple[int, ...], number: int) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    heads, head_dim, width = shape
    whole = 2 * heads * head_dim, width
    return whole, (heads, 2 * head_dim, width), np.s_[:, number * head_dim : (number + 1) * head_dim]


def qkv_sizes(delta: DeltaConfig) -> tuple[int, ...]:
    """Channels of the queries, keys and values."""
    return delta.key_channels, delta.key_channels, delta.value_channels


def read_step_limits(fields: Fields) -> tuple[float, float | None]:
    """Reads `time_step_limit`, the least and largest time step of a Mamba 2 mixer. JSON has several infinities."""
    written = fields.take("time_step_limit", None)
    limits = [0.0, math.inf] if written is None else written
    if isinstance(limits, list) and len(limits) == 2:
        least, most = (math.inf if x in ({"__float__": "Infinity"}, "Infinity", "inf") else x for x in limits)
        if all(isinstance(x, int | float) and not isinstance(x, bool) for x in (least, most)) and 0 <= least < most:
            return float(least), None if most == math.inf else float(most)
    raise fields.refuse("time_step_limit", written, "two numbers, the first from 0 on and less than the second")


def render_step_limits(limits: tuple[float, float | None]) -> list[Any]:
    """Writes what `read_step_limits` reads, as transformers does."""
    return [limits[0], {"__float__": "Infinity"} if limits[1] is None else limits[1]]


def read_mamba(fields: Fields, width: int, **values: Any) -> SpaceConfig:
    """Reads a Mamba 2 mixer, of `width` channels unless the config gives a width for each head."""
    heads, given = fields.size("mamba_n_heads", 128, most=MOST_HEADS), fields.take("mamba_d_head", "auto")
    if given != "auto":
        fields.left["mamba_d_head"] = given
        given = fields.size("mamba_d_head", most=MOST_DIM)
    if width % heads or given not in ("auto", width // heads):
        raise fields.refuse("mamba_d_head", given, f"{width} channels, in mamba_n_heads = {heads} heads of one width")
    fields.take("mamba_chunk_size", None)  # of kernels
    bias = fields.flag("mamba_proj_bias", False)
    return make_part(
        SpaceConfig, "Mamba layers", fields, heads=heads, head_dim=width // heads,
        state_dim=fields.size("mamba_d_state", 256, most=MOST_DIM),
        groups=fields.size("mamba_n_groups", 1, most=MOST_HEADS),
        width=fields.size("mamba_d_conv", 4, least=2, most=MOST_DIM), conv_bias=fields.flag("mamba_conv_bias", True),
        step_limits=read_step_limits(fields), **dict(bias=bias, out_bias=bias) | values,
    )  # fmt: skip


def render_mamba(space: SpaceConfig | None) -> dict[str, Any]:
    """Writes what `read_mamba` reads."""
    return {} if space is None else {
        "mamba_n_heads": space.heads, "mamba_d_head": space.head_dim, "mamba_d_state": space.state_dim,
        "mamba_n_groups": space.groups, "mamba_d_conv": space.width, "mamba_conv_bias": space.conv_bias,
        "mamba_proj_bias": space.bias, "time_step_limit": render_step_limits(space.step_limits),
    }  # fmt: skip


def mamba_names(prefix: str) -> dict[str, Any]:
    """Returns the names of the parameters of a Mamba 2 mixer."""
    return {
        "mixer.project": f"{prefix}.in_proj.weight", "mixer.project_bias": f"{prefix}.in_proj.bias",
        "mixer.conv": whole_conv(f"{prefix}.conv1d.weight"), "mixer.conv_bias": f"{prefix}.conv1d.bias",
        "mixer.log_decay": f"{prefix}.A_log", "mixer.step_bias": f"{prefix}.dt_bias", "mixer.skip": f"{prefix}.D",
        "mixer.norm": f"{prefix}.norm.weight", "mixer.out": f"{prefix}.out_proj.weight",
        "mixer.out_bias": f"{prefix}.out_proj.bias",
    }  # fmt: skip


def whole_conv(name: str) -> Section:
    """Returns the kernels of all channels."""
    return Section(name, lambda config, shape: ((shape[0], 1, shape[1]), shape, ...))


def half_rows(name: str, number: int) -> Section:
    """Returns the first or the second half of a tensor's rows."""
    return Section(name, lambda config, shape: (
        (2 * shape[0], shape[1]), (2, *shape), np.s_[number],
    ))  # fmt: skip


def delta_names(prefix: str) -> dict[str, Any]:
    """Returns the names of the parameters of a gated delta net that all of its families store alike."""
    conv = f"{prefix}.conv1d.weight"
    return {
        "mixer.query_conv": conv_rows(conv, qkv_sizes, 0), "mixer.key_conv": conv_rows(conv, qkv_sizes, 1),
        "mixer.value_conv": conv_rows(conv, qkv_sizes, 2), "mixer.log_decay": f"{prefix}.A_log",
        "mixer.decay_bias": f"{prefix}.dt_bias", "mixer.norm": f"{prefix}.norm.weight",
        "mixer.out": f"{prefix}.out_proj.weight",
    }  # fmt: skip


def join_convs(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the kernels of queries, keys and values as one tensor, where a checkpoint has three."""
    tensors = dict(tensors)
    for first in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        prefix = first.removesuffix("q_conv1d.weight")
        names = [f"{prefix}{kind}_conv1d.weight" for kind in "qkv"]
        if all(name in tensors for name in names):
            tensors[f"{prefix}conv1d.weight"] = np.concatenate([np.asarray(tensors.pop(name)) for name in names])
    return tensors
