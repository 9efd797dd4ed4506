"""Computes without a cache what an engine's steps have chosen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxkv._core.state.sharding import share
from jaxkv._engine.programs.model import ADAPTERS_ARGUMENT, PAGE, describe_error, takes
from jaxkv._engine.programs.program_cache import share_programs
from jaxkv._engine.programs.step_rows import ADAPTER, Asked, Hook, apply_hook, rows_so_far
from jaxkv._engine.requests.hook_args import Form
from jaxkv._engine.requests.sampling import Kind, choose


@share_programs
def recompute_program(model: Any, hook: Hook | None, width: int, place: NamedSharding | None = None) -> Any:
    """Compiles a program for the token that follows each of `i32[T]`, computed without a cache; whole on `place`, as in
    `share`."""

    def program(leaves, tokens, column, *, kind, form):
        whole = jax.tree.unflatten(model, leaves)
        own = {ADAPTERS_ARGUMENT: column[ADAPTER][None]} if takes(whole, ADAPTERS_ARGUMENT) else {}
        try:
            logits, _ = whole(tokens[None], cache=None, **own)
        except Exception as error:
            raise ValueError(
                f"The model fails without a cache ({describe_error(error)}). recompute calls it with cache=None and "
                f"tokens i32[1, {tokens.shape[0]}]: give its layers dense attention for such calls. {PAGE}"
            ) from error
        logits, count = logits[0].astype(jnp.float32), tokens.shape[0]
        lengths = jnp.arange(1, count + 1, dtype=jnp.int32)
        asked = Asked.unpack(jnp.broadcast_to(column[:, None], (column.shape[0], count)), form)
        if hook is not None:
            padded = jnp.pad(tokens, (0, max(0, width - count)))[:width]
            known = jnp.broadcast_to(padded[None], (count, padded.shape[0]))
            logits = apply_hook(hook, logits, rows_so_far(known, lengths, asked))
        return share(choose(kind, logits, asked.sampling, lengths), place)

    return jax.jit(program, static_argnames=("kind", "form"))


def recompute(
    model: Any,
    leaves: list[Any],
    hook: Hook | None,
    width: int,
    tokens: list[int],
    column: np.ndarray,
    kind: Kind,
    form: Form | None = None,
    place: NamedSharding | None = None,
) -> list[int]:
    """Computes the token that the model chooses after each of `tokens`, without any cache.

    Args:
      width: the engine's max_seq_len. column: one of a step's `rows`. place: as in `share`.
    """
    padded = np.zeros(1 << (len(tokens) - 1).bit_length(), np.int32)  # few shapes; padding is not seen
    padded[: len(tokens)] = tokens
    chosen = recompute_program(model, hook, width, place)(leaves, padded, column, kind=kind, form=form)
    return np.asarray(chosen)[: len(tokens)].tolist()
