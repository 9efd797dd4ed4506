"""Rotations: the form for TPUs, which is compiled there alone, against the other; LongRoPE; a part of a head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import config_reader
from jaxkv.models.rope import Rope, pairs_by_halves, pairs_by_product


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pairs_by_product_are_those_by_halves(dtype, head_dim, interleaved):
    x = jax.random.normal(jax.random.key(0), (5, 3, head_dim)).astype(dtype)
    for found, wanted in zip(pairs_by_product(x, interleaved), pairs_by_halves(x, interleaved), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "interleaved", "by_product"),
    [(33, 128, False, True), (32, 128, False, False), (64, 64, False, False), (1, 64, True, True)],
)
def test_where_a_tpu_rotates_by_a_product(num_tokens, head_dim, interleaved, by_product):
    rope, x = Rope(interleaved=interleaved), jnp.ones((num_tokens, 2, head_dim))
    traced = jax.jit(lambda x: rope(x, x, jnp.arange(num_tokens))).trace(x)
    for platform, there in (("tpu", by_product), ("cpu", False)):
        assert ("dot_general" in traced.lower(lowering_platforms=(platform,)).as_text()) == there


PHI = {
    "model_type": "phi3", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8},
}  # fmt: skip


def test_longrope_by_hand():
    """Phi 3's factor of attention for 32 times its first length; the short list where that length is the model's."""
    long = config_reader.parse(PHI).ropes[0]
    assert abs(long.magnitude - (1 + 5 / 12) ** 0.5) < 1e-12  # 32 = 2^5, 4096 = 2^12
    np.testing.assert_allclose(long.frequencies(16), Rope().frequencies(16) / 2, rtol=1e-6)
    short = config_reader.parse(PHI | {"max_position_embeddings": 4096}).ropes[0]
    assert short.magnitude == 1
    np.testing.assert_array_equal(short.frequencies(16), Rope().frequencies(16))
    with pytest.raises(ValueError, match=r"long_factor or short_factor = .*knows 8 numbers"):
        config_reader.parse(PHI | {"rope_scaling": PHI["rope_scaling"] | {"long_factor": [2.0] * 7}})


def test_a_part_of_a_head_and_none():
    q, positions = jnp.ones((3, 2, 8)), jnp.arange(3, dtype=jnp.int32)
    part = Rope(partial_rotary_factor=0.5)(q, q, positions)[0]
    np.testing.assert_array_equal(part[..., 4:], q[..., 4:])
    np.testing.assert_allclose(part[..., :4], Rope()(q[..., :4], q[..., :4], positions)[0], rtol=1e-6)
    np.testing.assert_array_equal(Rope(partial_rotary_factor=0.0)(q, q, positions)[0], q)
