"""Log-probabilities of a forward pass without a cache, to hold an engine's against."""

import jax
import jax.numpy as jnp
import numpy as np


def make_logprobs(model, most):
    """Returns a function of at most `most` tokens: the log-probabilities of all tokens behind each of them."""
    run = jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens[None], cache=None)[0][0]))

    def compute(tokens):
        padded = np.zeros(most, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(run(jnp.asarray(padded)))[: len(tokens)]

    return compute
