"""One attention layer: its shape, its storage, and what differs from the other layers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._core.numbers import integer


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a key or value element is stored: a static name that chooses the kernel, and what it costs."""

    name: str
    bytes_per_element: int

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.name)


KINDS = {kind.name: kind for kind in (Kind("bfloat16", 2), Kind("float16", 2), Kind("float32", 4))}


def kind_of(dtype: Any, field: str) -> Kind:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in KINDS:
        raise ValueError(f"{field} must be one of {', '.join(KINDS)}, not {name}.")
    return KINDS[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One attention layer: its shape, and what differs from the other layers.

    Args:
      num_kv_heads: KV heads, K in shapes.
      head_dim: elements per head, D in shapes.
      window: a token sees only the last `window` positions, its own included; None: all. What no later token can see
        is given back to the pool.
      dtype: the layer's storage, when it is not the cache's.
      shares_with: an earlier layer whose keys and values this one reads. It stores none of its own.

    >>> LayerConfig(num_kv_heads=2, head_dim=64).dim
    128
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: Any = None
    shares_with: int | None = None

    def __post_init__(self):
        for field, least in {"num_kv_heads": 1, "head_dim": 1, "window": 1, "shares_with": 0}.items():
            value, optional = getattr(self, field), field in ("window", "shares_with")
            if not (optional and value is None):
                object.__setattr__(self, field, integer(f"LayerConfig.{field}", value, least=least))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", kind_of(self.dtype, "LayerConfig.dtype").dtype)

    @property
    def dim(self) -> int:
        """Elements of one token's keys (and as many of its values)."""
        return self.num_kv_heads * self.head_dim
