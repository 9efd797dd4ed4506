"""One attention layer: its shape, its storage, and what differs from the other layers."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxkv._core.config.validation import flag, integer, shown
from pallas_kernels.common.quantization import FORMATS, StorageFormat


def kind_of(dtype: Any, field: str) -> StorageFormat:
    """Returns the storage format that a dtype, or its name, means. Raises ValueError, naming the field."""
    try:
        name = jnp.dtype(dtype).name
    except Exception:  # NumPy reads dicts and lists, too, and has errors of many types for them
        name = dtype
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"{field} must be one of {', '.join(FORMATS)}, not {shown(dtype)}.")
    return FORMATS[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One attention layer: its shape, and what differs from the other layers.

    Args:
      num_kv_heads: KV heads, K in shapes.
      head_dim: elements per head, D in shapes.
      window: a token sees only the last `window` positions, its own included; None: all. What no later token can see
        is given back to the pool.
      sink_tokens: with `window`, a token sees the first so many of its row too, and they stay: what lies between is
        given back (StreamingLLM, https://arxiv.org/abs/2309.17453).
      chunk: a token sees only its own chunk, from `position // chunk * chunk` on (Llama 4's local layers). What lies
        before the next token's is given back. Not with `window`.
      dtype: the layer's storage, when it is not the cache's.
      shares_with: an earlier layer whose keys and values this one reads. It stores none of its own.
      rank: of a latent layer, how many numbers of a token are its values too; see `latent`.
      rotate: of a quantised layer: whether heads are rotated before they are stored, so that channels much
        larger than the others do not take all of the scale; see `jaxkv._core.config.rotation`. Queries and outputs
        follow by themselves. None: as the kind does best.
      evict: "layer" or "head": tokens of a row may be given back by `jaxkv.evict`, whole or head by head. Such a layer
        has block tables of its own, with "head" one for each KV head, and blocks of one head. Not with `window` or
        `chunk`.
      bounds: the least and the largest key entries of every block lie beside it, kept by whatever writes, for
        `block_bounds` and `jaxkv.scores.quest` to read few blocks. Not with `evict="head"`.

    >>> LayerConfig(num_kv_heads=2, head_dim=64).dim
    128
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: Any = None
    shares_with: int | None = None
    rank: int | None = None
    rotate: bool | None = None
    chunk: int | None = None
    evict: str | None = None
    sink_tokens: int | None = None
    bounds: bool = False

    def __post_init__(self):
        least_of = {"shares_with": 0} | dict.fromkeys(("window", "rank", "chunk", "sink_tokens"), 1)
        limits = {"num_kv_heads": 1, "head_dim": 1} | least_of
        for field, least in limits.items():
            value, optional = getattr(self, field), field not in ("num_kv_heads", "head_dim")
            if not (optional and value is None):
                object.__setattr__(self, field, integer(f"LayerConfig.{field}", value, least=least))
        if not (self.rotate is None or isinstance(self.rotate, bool)):
            raise ValueError(f"LayerConfig.rotate must be True, False or None, not {shown(self.rotate)}.")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", kind_of(self.dtype, "LayerConfig.dtype").declared_dtype)

        if self.chunk is not None and self.window is not None:
            raise ValueError(
                f"LayerConfig.chunk={self.chunk} and window={self.window} cannot both limit what a token sees: leave "
                "one out."
            )
        if self.sink_tokens is not None and self.window is None:
            raise ValueError(
                f"LayerConfig.sink_tokens={self.sink_tokens} are seen beside a window, and there is none: give window, "
                "or leave them out."
            )
        if self.evict not in (None, "layer", "head"):
            raise ValueError(f'LayerConfig.evict must be "layer", "head" or None, not {shown(self.evict)}.')
        if self.evict is not None and self.reach is not None:
            raise ValueError(
                f"A layer {self.sight} gives back what its tokens do not see, by position, and cannot have evict="
                f"{self.evict!r} too: leave one out."
            )
        object.__setattr__(self, "bounds", flag("LayerConfig.bounds", self.bounds))
        if self.bounds and self.evict == "head":
            raise ValueError(
                'LayerConfig.bounds are of blocks that hold all heads, and with evict="head" each head has blocks of '
                'its own: choose evict="layer", or leave bounds out.'
            )
        if self.rank is not None and self.evict == "head":
            raise ValueError('A latent layer has no heads to evict by: give it evict="layer".')
        if self.rank is not None and (self.num_kv_heads != 1 or self.rank >= self.head_dim):
            raise ValueError(
                f"LayerConfig.rank is for latent layers, of one head that is wider than it, but rank is {self.rank}, "
                f"num_kv_heads {self.num_kv_heads} and head_dim {self.head_dim}: make it with LayerConfig.latent."
            )

    @classmethod
    def latent(cls, rank: int = 512, rope_dim: int = 64, **fields: Any) -> "LayerConfig":
        """A layer that keeps one row `[rank + rope_dim]` a token, without heads; the values are its first `rank`
        numbers, so a token is stored once.

        Queries come absorbed, `[.., H, rank + rope_dim]`, keys as `[.., 1, rank + rope_dim]`, values as None; the
        output is `[.., H, rank]`, and `attention` and `attend` want `scale=`.

        Args:
          rank: numbers of a token that all heads' keys and values are made from.
          rope_dim: numbers of the key that carries positions, shared by all heads.
          **fields: `window`, `dtype`, `bounds` and `shares_with`.

        From DeepSeek-V2 (https://arxiv.org/abs/2405.04434).

        >>> LayerConfig.latent().head_dim
        576
        """
        rank, rope_dim = integer("rank", rank, least=1), integer("rope_dim", rope_dim, least=1)
        return cls(num_kv_heads=1, head_dim=rank + rope_dim, rank=rank, **fields)

    @property
    def reach(self) -> int | None:
        """How many last positions a token sees at the most, by window or chunk; None: all."""
        return self.chunk if self.window is None else self.window

    @property
    def sight(self) -> str:
        """What a token sees, in words."""
        if self.chunk is not None:
            return f"with chunks of {self.chunk}"
        if self.evict is not None:
            return f'with evict="{self.evict}"'
        first = "" if self.sink_tokens is None else f" behind {self.sink_tokens} first tokens"
        return "without a window" if self.window is None else f"with a window of {self.window}{first}"

    @property
    def dim(self) -> int:
        """Elements of one token's keys (and as many of its values, but in a latent layer, which stores none)."""
        return self.num_kv_heads * self.head_dim
