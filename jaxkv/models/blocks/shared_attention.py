"""Attention that reads an earlier layer's keys and values, takes its keys for values, or normalises values (Gemma)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.models.blocks.norms import normalize
from jaxkv.nnx import Attention, project


class KeptKeys(dict[int, tuple[jax.Array, jax.Array]]):
    """The keys and values of each layer, for later ones that read them, where there is no cache."""


class SharedAttention(Attention):
    """`jaxkv.nnx.Attention` with fewer projections.

    Args:
      owner: the layer whose keys and values this one reads: it has no projections of its own for them.
      values_are_keys: values are keys before their norm and rotation.
      value_eps: epsilon of an RMS norm, without weights, of each head's values; None: no such norm.
      **options: those of `Attention`.
    """

    def __init__(self, *args: Any, owner: int | None, values_are_keys: bool, value_eps: float | None, **options: Any):
        super().__init__(*args, **options)
        self.owner, self.value_eps = owner, value_eps
        if owner is not None:
            self.key = self.key_bias = None  # type: ignore[assignment]
        if owner is not None or values_are_keys:
            self.value = self.value_bias = None  # type: ignore[assignment]

    def inputs(self, x: jax.Array, positions: Any) -> tuple:
        assert self.position_fn is not None
        q, k, v, sinks = project("...e,hde->...hd", x, self.query, self.query_bias), None, None, None
        if self.owner is not None:
            q, _ = self.position_fn(q, q, positions)
        else:
            k = project("...e,kde->...kd", x, self.key, self.key_bias)
            v = k if self.value is None else project("...e,kde->...kd", x, self.value, self.value_bias)
            v = v if self.value_eps is None else normalize(v, eps=self.value_eps)
            q, k = self.position_fn(q, k, positions)
        return q, k, v, sinks if self.sinks is None else self.sinks[...].astype(jnp.float32)

    def attend(self, inputs: tuple, cache: Any, layer: Any, *args: Any) -> tuple[jax.Array, Any]:
        if not isinstance(cache, KeptKeys):
            return super().attend(inputs, cache, layer, *args)
        q, k, v, sinks = inputs
        k, v = (k, v) if self.owner is None else cache[self.owner]
        return super().attend((q, k, v, sinks), None, layer, *args)[0], KeptKeys({**cache, layer: (k, v)})
