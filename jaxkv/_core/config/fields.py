"""The fields that calls hand on to `CacheConfig`, so that type checkers and completion know them."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict


class LayoutFields(TypedDict, total=False):
    """Fields that `CacheConfig.from_model` hands on."""

    block_size: int | None
    layout: Literal["paged", "contiguous"]
    head_dim_multiple: int | None
    join_kv: bool | Literal["head"] | None
    stacked: bool
    residual_length: int | None


class SizeFields(LayoutFields, total=False):
    """Those, and how many blocks there are: fields that `CacheConfig.uniform` and `Engine` hand on."""

    snapshot_every: int | None
    num_blocks: int | None
    group_blocks: Sequence[int] | None
    memory_bytes: float | None


class UniformFields(SizeFields, total=False):
    """Those, and the step that a cache is made for."""

    max_tokens: int | None
    step_tokens: int | None
    prefix_cache: bool
    mesh: Any  # jax.sharding.Mesh | None


class EngineFields(SizeFields, total=False):
    """Fields that `Engine` hands on."""

    dtype: Any
