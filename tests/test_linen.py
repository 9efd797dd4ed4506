"""`jaxkv.linen.Attention`."""

import adapters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv.linen
import jaxkv.nnx


def make(**options):
    """`(apply, params)` of a layer with random parameters."""
    layer = jaxkv.linen.Attention(**adapters.OPTIONS | options)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 2, adapters.WIDTH)))  # compiles nothing
    params = adapters.randomise(shapes)

    def apply(params, x, **arguments):
        return layer.apply(params, jnp.asarray(x), **arguments)

    return apply, params


@pytest.mark.parametrize("variant", ["biases", "window", "sinks"] if NIGHTLY else ["window"])
def test_padded_steps_equal_the_dense_path(variant):
    adapters.check_padded(*make(**adapters.VARIANTS[variant]))


def test_every_option_matters():
    adapters.check_options_matter(make)


def test_packed_steps_equal_the_dense_path():
    adapters.check_packed(*make(use_bias=True))


def test_scan_over_steps():
    adapters.check_scan(*make())


def test_it_computes_what_the_nnx_layer_computes():
    from flax import nnx

    apply, params = make(use_bias=True, use_sinks=True)
    names = params["params"]
    other = jaxkv.nnx.Attention(adapters.WIDTH, **adapters.OPTIONS, use_bias=True, use_sinks=True, rngs=nnx.Rngs(0))
    for name in ("query", "key", "value", "out"):
        kernel = names[name]["kernel"]
        setattr(other, name, nnx.Param(kernel if name == "out" else jnp.moveaxis(kernel, 0, -1)))
        setattr(other, f"{name}_bias", nnx.Param(names[name]["bias"]))
    other.sinks = nnx.Param(names["sinks"])
    x = jnp.asarray(adapters.sequences()[0])
    np.testing.assert_allclose(apply(params, x)[0], other(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(num_heads=4, num_kv_heads=3), "4 query heads cannot be shared among 3 KV heads"),
        (dict(num_heads=0), "num_heads must be at least 1, not 0"),  # which would end the process within XLA
        (dict(num_heads=4, head_dim=True), "head_dim must be an integer, not True"),
        (dict(num_heads=5), "in_features 24 is not a multiple of num_heads 5"),
    ],
)
def test_bad_arguments(options, says):
    with pytest.raises(ValueError, match=says):
        jaxkv.linen.Attention(**options).init(jax.random.key(0), jnp.ones((1, 2, adapters.WIDTH)))
