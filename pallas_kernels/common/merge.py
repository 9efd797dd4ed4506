"""Attention over parts of a context, put together."""

from typing import Any

import jax
import jax.numpy as jnp


def merge_attention(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The attention over a context from that over its parts, each with its LSE (as `return_lse` gives it).

    Args:
      outs: `[P, ..., H, D]`, the outputs of P parts.
      lses: `f32[P, ..., H]`, the natural logarithms of their softmax denominators. A part with -inf saw nothing, and
        what its output holds is not read. Beside one with +inf no other part has any weight.

    Returns:
      `(out, lse)`, `[..., H, D]` in `outs`' dtype and `f32[..., H]`; 0 and -inf where no part saw anything.

    Raises:
      ValueError: shapes that do not fit together.

    The arithmetic is that of online softmax (https://arxiv.org/abs/1805.02867), over parts.

    >>> outs, lses = jnp.array([[[1.0]], [[4.0]]]), jnp.log(jnp.array([[1.0], [2.0]]))
    >>> out, lse = merge_attention(outs, lses)
    >>> f"{out[0, 0]:.1f}", f"{jnp.exp(lse[0]):.1f}"
    ('3.0', '3.0')
    """
    outs, lses = _read("outs", outs), _read("lses", lses)
    if outs.ndim < 2 or lses.shape != outs.shape[:-1]:
        raise ValueError(
            f"outs must be [P, ..., H, D] and lses [P, ..., H], but their shapes are {outs.shape} and {lses.shape}."
        )
    lses = lses.astype(jnp.float32)
    # Parts without bounds leave nothing to the others, and share alike.
    boundless = jnp.isposinf(lses)
    is_boundless = boundless.any(axis=0)
    lses = jnp.where(is_boundless[None], jnp.where(boundless, 0.0, -jnp.inf), lses)
    seen = ~jnp.isneginf(lses)
    finite = jnp.where(seen, lses, 0.0)  # selected before the arithmetic too, so that gradients stay finite
    top = jax.lax.stop_gradient(jnp.max(jnp.where(seen, finite, -jnp.inf), axis=0, initial=-jnp.inf))
    nothing = jnp.isneginf(top)
    top = jnp.where(nothing, 0.0, top)
    # Part by part: a sum over an axis may be rounded otherwise where there are more tokens, and bits should not differ.
    total, out = jnp.zeros(lses.shape[1:], jnp.float32), jnp.zeros(outs.shape[1:], jnp.float32)
    for part in range(len(outs)):
        weight = jnp.where(seen[part], jnp.exp(finite[part] - top), 0.0)
        values = jnp.where(seen[part][..., None], outs[part].astype(jnp.float32), 0.0)
        total, out = total + weight, out + values * weight[..., None]
    total = jnp.where(nothing, 1.0, total)
    out /= total[..., None]
    lse = jnp.where(nothing, -jnp.inf, top + jnp.log(total))
    return out.astype(outs.dtype), jnp.where(is_boundless, jnp.inf, lse)


def _read(name: str, parts: Any) -> jax.Array:
    """Returns an array of floating point numbers, or a list of them as one. Raises ValueError."""
    try:
        parts = jnp.asarray(parts)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be an array of the parts' numbers, not a {type(parts).__name__}.") from None
    if not jnp.issubdtype(parts.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point, not {parts.dtype}.")
    return parts
