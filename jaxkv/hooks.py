"""What a `logits_hook` is made of: small pure functions of logits, by each row's numbers. `import jaxkv.hooks`.

- `min_tokens`: no stop token before so many tokens are there.
- `presence_penalty`, `frequency_penalty`, `repetition_penalty`: less of what the output has already.
- `logit_bias`: tokens made likelier or less likely.

A hook calls what it needs with the numbers that requests give, `engine.submit(prompt, hook_args={...})`. All requests
give the same fields; who gives none has zeros, with which nothing here changes anything:

    def hook(logits, rows):
        if (args := rows.hook_args) is not None:  # as long as no request has given any
            logits = jaxkv.hooks.presence_penalty(logits, rows, args["presence"])
            logits = jaxkv.hooks.min_tokens(logits, rows, args["min_tokens"], stop_tokens=(2,))
        return logits

    engine = jaxkv.Engine(model, logits_hook=hook)
    engine.submit(prompt, eos=2, hook_args={"presence": 0.5, "min_tokens": 10})

Everything is computed on the device within the step: no callback of the host, whatever else the engine does.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._engine.programs.step_rows import StepRows

__all__ = ["frequency_penalty", "logit_bias", "min_tokens", "presence_penalty", "repetition_penalty"]


def min_tokens(logits: jax.Array, rows: StepRows, count: Any, stop_tokens: Any) -> jax.Array:
    """Returns logits in which no stop token can be chosen while a row's output has fewer than `count` tokens.

    Args:
      logits: `f32[S, V]`. rows: as the hook is given them.
      count: a number, or one for each row, `i32[S]`.
      stop_tokens: `i32[n]`, the same for all rows, or `i32[S, n]`; what is no token of the vocabulary is passed over.

    >>> rows = _example()  # two rows with one prompt token each, and outputs of 3 and 1 tokens
    >>> min_tokens(jnp.zeros((2, 4)), rows, 2, stop_tokens=[3]).tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -inf]]
    """
    is_short = rows.lengths - rows.prompt_lengths < jnp.asarray(count, jnp.int32)
    is_stop = _add_at(jnp.zeros(logits.shape, bool), stop_tokens, True)
    return jnp.where(is_short[:, None] & is_stop, -jnp.inf, logits)


def presence_penalty(logits: jax.Array, rows: StepRows, penalty: Any) -> jax.Array:
    """Returns logits less `penalty`, a number or `f32[S]`, for each token of the row's output; prompts do not count.

    >>> presence_penalty(jnp.zeros((2, 4)), _example(), 0.5).tolist()
    [[0.0, -0.5, -0.5, 0.0], [0.0, 0.0, 0.0, -0.5]]
    """
    return logits - _each_row(penalty) * (count_output(rows, logits.shape[1]) > 0).astype(logits.dtype)


def frequency_penalty(logits: jax.Array, rows: StepRows, penalty: Any) -> jax.Array:
    """Returns logits less `penalty`, a number or `f32[S]`, for each time that the row's output has a token.

    >>> frequency_penalty(jnp.zeros((2, 4)), _example(), 0.5).tolist()
    [[0.0, -1.0, -0.5, 0.0], [0.0, 0.0, 0.0, -0.5]]
    """
    return logits - _each_row(penalty) * count_output(rows, logits.shape[1]).astype(logits.dtype)


def repetition_penalty(logits: jax.Array, rows: StepRows, penalty: Any) -> jax.Array:
    """Divides logits of tokens in the row's output by `penalty` where they are above 0, else multiplies them by it.

    Args:
      penalty: a number or `f32[S]`, above 1 to have less of them; 1 and 0 change nothing. From CTRL
        (https://arxiv.org/abs/1909.05858), of the output alone.

    >>> repetition_penalty(jnp.array([[1.0, 2.0, -2.0, 1.0]] * 2), _example(), 2.0).tolist()
    [[1.0, 1.0, -4.0, 1.0], [1.0, 2.0, -2.0, 0.5]]
    """
    penalty = _each_row(penalty)
    penalty = jnp.where(penalty == 0, 1, penalty)
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(count_output(rows, logits.shape[1]) > 0, penalised, logits)


def logit_bias(logits: jax.Array, tokens: Any, biases: Any) -> jax.Array:
    """Adds a bias to the logits of some tokens.

    Args:
      logits: `f32[S, V]`.
      tokens: `i32[n]` or of each row `i32[S, n]`; what is no token of the vocabulary, such as -1, is passed over, so
        that rows can have fewer than others.
      biases: `f32` of the same shape. Both may be lists of n numbers or of n arrays `[S]`. A token that is there twice
        gets both.

    >>> logit_bias(jnp.zeros((2, 4)), jnp.array([[1, -1], [0, 3]]), jnp.array([[5.0, 9.0], [1.0, -1.0]])).tolist()
    [[0.0, 5.0, 0.0, 0.0], [1.0, 0.0, 0.0, -1.0]]
    """
    return _add_at(logits, tokens, _expand_rows(biases, logits.dtype))


def count_output(rows: StepRows, vocab_size: int) -> jax.Array:
    """Returns `i32[S, V]`: how often each row's output has each token."""
    position = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None]
    is_output = (position >= rows.prompt_lengths[:, None]) & (position < rows.lengths[:, None])
    zeros = jnp.zeros((rows.tokens.shape[0], vocab_size), jnp.int32)
    return _add_at(zeros, jnp.where(is_output, rows.tokens, -1), 1)


def _add_at(x: jax.Array, tokens: Any, value: Any) -> jax.Array:
    """Adds a value to `x [S, V]` at some tokens of each row; or-s booleans."""
    tokens = _expand_rows(tokens, jnp.int32)
    tokens = jnp.broadcast_to(tokens, (x.shape[0], tokens.shape[-1]))
    tokens = jnp.where(tokens < 0, x.shape[1], tokens)  # a negative index would count from the end
    at = x.at[jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], tokens]
    return at.max(value, mode="drop") if x.dtype == bool else at.add(value, mode="drop")


def _expand_rows(numbers: Any, dtype: Any) -> jax.Array:
    """Returns `[n]` or `[S, n]`, from a list of n numbers of each row too: so a list in `hook_args` arrives."""
    if isinstance(numbers, list | tuple):
        return jnp.stack([jnp.asarray(x, dtype) for x in numbers], axis=-1)
    return jnp.asarray(numbers, dtype)


def _each_row(penalty: Any) -> jax.Array:
    penalty = jnp.asarray(penalty, jnp.float32)
    return penalty[:, None] if penalty.ndim else penalty[None, None]


def _example() -> StepRows:
    tokens = jnp.array([[0, 1, 2, 1], [0, 3, 9, 9]])
    return StepRows(tokens, jnp.array([4, 2]), jnp.array([0, 1]), jnp.array([1, 1]), None)
