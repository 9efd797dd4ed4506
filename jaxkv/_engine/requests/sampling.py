"""Sampling: from logits to each row's next token, independent of the rest of the batch."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.validation import integer, read_list, real, show

# What the rows of a step need at most: no random numbers, random numbers, or also a sort of all logits.
Kind = Literal["greedy", "sampled", "filtered"]
NO_TOKEN = -2  # chosen where no logit is above -inf, or any is NaN
FIELDS = 7  # of `Sampling`
KINDS: tuple[Kind, ...] = ("greedy", "sampled", "filtered")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen."""

    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int = 0  # choose among this many likeliest tokens; 0: all
    top_p: float = 1.0  # of these, among the likeliest that together have this share of their probability
    min_p: float = 0.0  # of these, among those that have this share of the likeliest one's probability
    seed: int = 0
    draws: int | None = None  # which of the seed's draws they are; None: those of the request's number

    @classmethod
    def read(
        cls, temperature: Any, top_k: Any, top_p: Any, min_p: Any, seed: Any, draws: Any = None
    ) -> "SamplingParams":
        """Makes the choice that a caller asks for. Raises ValueError."""
        temperature = real("temperature", temperature, least=0, most=float(np.finfo(np.float32).max))
        top_k, top_p = integer("top_k", top_k, least=0), real("top_p", top_p, most=1)
        if top_p <= 0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {show(top_p)}.")
        min_p = real("min_p", min_p, least=0, most=1)
        draws = None if draws is None else integer("draws", draws, least=0)
        return cls(temperature, top_k, top_p, min_p, read_seed(seed), draws)

    @property
    def kind(self) -> Kind:
        """The kind of step that this choice needs."""
        if self.temperature == 0:
            return "greedy"
        return "sampled" if (self.top_k, self.top_p, self.min_p) == (0, 1, 0) else "filtered"

    def column(self, number: int) -> np.ndarray:
        """Returns `i32[FIELDS]`, one column for `Sampling.unpack`: floats and the seed as their bits."""
        temperature, top_p, min_p = np.array([self.temperature, self.top_p, self.min_p], np.float32).view(np.int32)
        draws = number if self.draws is None else self.draws
        seed = np.uint32(self.seed).view(np.int32)
        return np.array([number, draws, seed, temperature, self.top_k, top_p, min_p], np.int32)


def read_seed(seed: Any) -> int:
    """Returns a seed that fits into 32 bits. Raises ValueError."""
    return integer("seed", seed, least=-(2**31), most=2**32 - 1) % 2**32


def read_kinds(kinds: Any) -> tuple[Kind, ...]:
    """Returns each of the kinds once. Raises ValueError."""
    kinds = read_list("kinds", kinds)
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"kinds must be among 'greedy', 'sampled' and 'filtered', not {show(kind)}.")
    return tuple(kind for kind in KINDS if kind in kinds)


class Sampling(NamedTuple):
    """The sampling parameters of each row, as arrays: another temperature needs no other compile."""

    numbers: jax.Array  # i32[S]: of the rows' requests
    draws: jax.Array  # i32[S]
    seeds: jax.Array  # u32[S]
    temperature: jax.Array  # f32[S]
    top_k: jax.Array  # i32[S]
    top_p: jax.Array  # f32[S]
    min_p: jax.Array  # f32[S]

    @classmethod
    def unpack(cls, columns: jax.Array) -> "Sampling":
        """Unpacks `i32[FIELDS, S]`, the rows' `SamplingParams.column` side by side."""
        numbers, draws, seeds, temperature, top_k, top_p, min_p = columns

        def as_float(bits: jax.Array) -> jax.Array:
            return jax.lax.bitcast_convert_type(bits, jnp.float32)

        seeds = jax.lax.bitcast_convert_type(seeds, jnp.uint32)
        return cls(numbers, draws, seeds, as_float(temperature), top_k, as_float(top_p), as_float(min_p))


def choose(kind: Kind, logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """Chooses the next token of each row, `f32[S, V]` to `i32[S]`: the likeliest at temperature 0, else a draw.

    The draw depends only on the request's seed, the number of its draws and the token's position. So a request gets the
    same tokens in any row, beside any others, and again after preemption. `kind` says what no row of the step needs; it
    changes no token. Returns NO_TOKEN where logits leave no choice.
    """
    is_possible = jnp.max(logits, axis=-1) > -jnp.inf  # a NaN is the largest, and not above
    likeliest = jnp.where(is_possible, jnp.argmax(logits, axis=-1).astype(jnp.int32), NO_TOKEN)
    if kind == "greedy":
        return likeliest

    def draw(logits, draws, seed, temperature, top_k, top_p, min_p, position):
        # From the likeliest down, so that no temperature makes it overflow.
        logits = (logits - jnp.max(logits)) / jnp.where(temperature > 0, temperature, 1)
        if kind == "filtered":
            logits = jnp.where(_kept(logits, top_k, top_p, min_p), logits, -jnp.inf)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), draws), position)
        return jax.random.categorical(key, logits)

    drawn = jax.vmap(draw)(logits, *sampling[1:], positions).astype(jnp.int32)
    return jnp.where((sampling.temperature > 0) & is_possible, drawn, likeliest)


def _kept(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Returns `bool[V]`: the tokens that pass the filters, always including the likeliest.

    Each filter works on the distribution that the previous one left, as in transformers, SGLang, FlashInfer, llama.cpp:
    `top_p` is a share of the probability of the `top_k`.
    """
    ordered, tokens = jax.lax.top_k(logits, logits.shape[-1])
    rank = jnp.arange(logits.shape[0], dtype=jnp.int32)
    among_likeliest = (rank < top_k) | (top_k == 0)
    probabilities = jax.nn.softmax(jnp.where(among_likeliest, ordered, -jnp.inf))
    before = jnp.cumsum(probabilities) - probabilities  # of the likelier tokens
    # Sums are rounded: where nothing is to be filtered out, the last tokens stay too, and what reaches top_p but for
    # rounding has reached it.
    within = (before < top_p - 4 * jnp.finfo(jnp.float32).eps) | (top_p == 1)
    is_likely = jnp.exp(ordered - ordered[0]) >= min_p
    kept = (among_likeliest & within & is_likely) | (rank == 0)
    return jnp.zeros(logits.shape, bool).at[tokens].set(kept, unique_indices=True)


def likeliest(logits: jax.Array, chosen: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities `f32[S, 1 + count]` of the chosen and the likeliest tokens, and these, `i32`.

    A chosen token that is the likeliest has the very same number twice.
    """
    logits = logits.astype(jnp.float32)  # XLA:CPU sorts those of other dtypes
    top, tokens = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    tokens = jnp.concatenate([chosen[:, None], tokens.astype(jnp.int32)], axis=1)
    wanted = jnp.concatenate([jnp.take_along_axis(logits, chosen[:, None], axis=1), top], axis=1)
    most = jnp.max(logits, axis=1, keepdims=True)  # not a slice of `top`: XLA:CPU would sort all logits for it
    return (wanted - most) - jnp.log(jnp.sum(jnp.exp(logits - most), axis=1, keepdims=True)), tokens
