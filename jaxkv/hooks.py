"""What a `logits_hook` is made of: small pure functions of logits, by each row's numbers. `import jaxkv.hooks`.

- `min_tokens`: no stop token before so many tokens are there.
- `presence_penalty`, `frequency_penalty`, `repetition_penalty`: less of what the output has already.
- `logit_bias`: tokens made likelier or less likely.
- `penalize` is a hook of all of them, and `penalties` makes its numbers:

    engine = jaxkv.Engine(model, logits_hook=jaxkv.hooks.penalize, hook_args=jaxkv.hooks.penalties())
    engine.submit(prompt, hook_args=jaxkv.hooks.penalties(repetition_penalty=1.1, logit_bias={5: -100.0}))

A hook of your own calls what it needs with the numbers that requests give, `engine.submit(prompt, hook_args={...})`.
All requests give the same fields; who gives none has those of the engine:

    def hook(logits, rows):
        logits = jaxkv.hooks.presence_penalty(logits, rows, rows.hook_args["presence"])
        return jaxkv.hooks.min_tokens(logits, rows, rows.hook_args["min_tokens"], stop_tokens=(2,))

    engine = jaxkv.Engine(model, logits_hook=hook, hook_args={"presence": 0.0, "min_tokens": 0})
    engine.submit(prompt, eos=2, hook_args={"presence": 0.5, "min_tokens": 10})

Everything is computed on the device within the step: no callback of the host, whatever else the engine does.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.validation import integer, real, show
from jaxkv._engine.programs.step_rows import StepRows

__all__ = [
    "frequency_penalty", "logit_bias", "min_tokens", "penalize", "penalties", "presence_penalty", "repetition_penalty",
]  # fmt: skip

MOST_BIASES, MOST_STOP_TOKENS = 300, 64  # of a request, in `penalties`
MOST = 1e6  # that a number there may be: beyond float32 nothing times infinity would be NaN


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


def repetition_penalty(logits: jax.Array, rows: StepRows, penalty: Any, *, with_prompt: bool = False) -> jax.Array:
    """Divides logits of tokens in the row's output by `penalty` where they are above 0, else multiplies them by it.

    Args:
      penalty: a number or `f32[S]`, above 1 to have less of them; 1 and 0 change nothing. From CTRL
        (https://arxiv.org/abs/1909.05858).
      with_prompt: tokens of the prompt count, too, as in transformers and vLLM.

    >>> repetition_penalty(jnp.array([[1.0, 2.0, -2.0, 1.0]] * 2), _example(), 2.0).tolist()
    [[1.0, 1.0, -4.0, 1.0], [1.0, 2.0, -2.0, 0.5]]
    """
    penalty = _each_row(penalty)
    penalty = jnp.where(penalty == 0, 1, penalty)
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(count_output(rows, logits.shape[1], with_prompt=with_prompt) > 0, penalised, logits)


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


def penalties(
    *,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    min_tokens: int = 0,
    stop_tokens: Iterable[int] = (),
) -> dict[str, Any]:
    """Returns the `hook_args` of a request for `penalize`, by vLLM's names. Without arguments they change nothing.

    Args:
      presence_penalty, frequency_penalty: of tokens of the output.
      repetition_penalty: of tokens of the prompt and the output; 1: none.
      logit_bias: by token, what is added to its logit; at most 300.
      min_tokens: tokens of an output before which none of `stop_tokens` can be chosen, of which there are at most 64.

    Raises:
      ValueError: a value that is none of these.

    >>> args = penalties(logit_bias={3: -100.0}, min_tokens=2, stop_tokens=[0])
    >>> rows = _example()._replace(hook_args=jax.tree.map(lambda x: jnp.stack([x, x]), args))
    >>> penalize(jnp.zeros((2, 4)), rows).tolist()
    [[0.0, 0.0, 0.0, -100.0], [-inf, 0.0, 0.0, -100.0]]
    """
    biases = {} if logit_bias is None else logit_bias
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias must be a dict of numbers by token, not {show(biases)}.")
    check_count("logit_bias", len(biases), MOST_BIASES)
    tokens = [integer("A token of logit_bias", token, least=0) for token in biases]
    stops = [integer("A token of stop_tokens", token, least=0) for token in stop_tokens]
    check_count("stop_tokens", len(stops), MOST_STOP_TOKENS)
    bounds: dict[str, float] = {"least": -MOST, "most": MOST}
    added = [real(f"The logit_bias of {show(token)}", bias, **bounds) for token, bias in biases.items()]
    more = MOST_BIASES - len(tokens)
    return {
        "presence_penalty": np.float32(real("presence_penalty", presence_penalty, **bounds)),
        "frequency_penalty": np.float32(real("frequency_penalty", frequency_penalty, **bounds)),
        "repetition_penalty": np.float32(real("repetition_penalty", repetition_penalty, above=0, most=MOST)),
        "bias_tokens": np.array(tokens + [-1] * more, np.int32),
        "biases": np.array(added + [0.0] * more, np.float32),
        "min_tokens": np.int32(integer("min_tokens", min_tokens, least=0)),
        "stop_tokens": np.array(stops + [-1] * (MOST_STOP_TOKENS - len(stops)), np.int32),
    }


def check_count(name: str, count: int, most: int) -> None:
    """Raises ValueError for more tokens than a request may name."""
    if count > most:
        raise ValueError(f"{name} must have at most {most} tokens, not {count}: leave some out.")


def penalize(logits: jax.Array, rows: StepRows) -> jax.Array:
    """Applies what requests ask for by `penalties`: a hook for `Engine(logits_hook=)`.

    In vLLM's order: the least number of tokens, biases, then penalties for repetition, frequency and presence. A step
    of which no request asks for anything only looks.

    >>> import jaxkv
    >>> model = jaxkv.models.small()
    >>> engine = jaxkv.Engine(model, max_seqs=1, max_seq_len=64, logits_hook=penalize, hook_args=penalties())
    >>> args = penalties(logit_bias={ord("x"): 100.0})
    >>> bytes(engine.submit(list(b"import "), max_new_tokens=3, hook_args=args).result())
    b'xxx'
    """
    args = rows.hook_args
    if args is None:
        return logits

    def change(logits: jax.Array) -> jax.Array:
        logits = min_tokens(logits, rows, args["min_tokens"], args["stop_tokens"])
        logits = logit_bias(logits, args["bias_tokens"], args["biases"])
        logits = repetition_penalty(logits, rows, args["repetition_penalty"], with_prompt=True)
        logits = frequency_penalty(logits, rows, args["frequency_penalty"])
        return presence_penalty(logits, rows, args["presence_penalty"])

    is_one = jnp.isin(args["repetition_penalty"], jnp.array([0.0, 1.0]))  # 0 of rows without a request
    numbers = [args[name] != 0 for name in ("presence_penalty", "frequency_penalty", "min_tokens", "biases")]
    asked = jnp.concatenate([jnp.ravel(x) for x in (~is_one, *numbers)]).any()
    return jax.lax.cond(asked, change, lambda logits: logits, logits)


def count_output(rows: StepRows, vocab_size: int, *, with_prompt: bool = False) -> jax.Array:
    """Returns `i32[S, V]`: how often each row's output has each token; or prompt and output together."""
    position = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None]
    is_output = position < rows.lengths[:, None]
    if not with_prompt:
        is_output &= position >= rows.prompt_lengths[:, None]
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
