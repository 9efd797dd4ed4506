"""A model's step, as far as a cache sees it."""

import jax
import numpy as np

import jaxkv


def scale_of(layer):
    """What logits are multiplied by; a latent layer has no default."""
    return 0.3 if layer.rank else layer.head_dim**-0.5


def attend_in_all_layers(cache, q, k, v):
    outs = []
    for layer, config in enumerate(cache.config.layers):
        options = {} if config.rank is None else {"scale": scale_of(config)}
        out, cache = jaxkv.attention(q[layer], k[layer], v[layer], cache, layer=layer, **options)
        outs.append(out)
    return outs, cache


def model_step(cache, q, k, v, num_tokens):
    return attend_in_all_layers(jaxkv.extend(cache, num_tokens), q, k, v)


def on_device(cache):
    """The cache on a device by name, as what comes back from the host is: else each program is compiled for either."""
    return jax.device_put(cache, jax.devices()[0])


_gather = jax.jit(jaxkv.gather, static_argnames=("layer", "max_len"))


def gather_row(cache, row, layer):
    """Returns what `gather` returns of a row, in NumPy. One program serves rows of all lengths."""
    found = _gather(cache, row, layer=layer, max_len=cache.config.max_seq_len)
    count = np.asarray(cache.layer(layer).held)[row].max()
    return tuple(np.asarray(x)[:count] for x in found)
