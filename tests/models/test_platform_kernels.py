"""Whole models in bfloat16 with whatever kernels the platform has, served by an engine: each chosen token is nearly the
likeliest one of the same model in float32 without a cache, which no kernel computes.

On an NVIDIA GPU these are the `gpu` kernels; elsewhere XLA, by night, which other tests prove more closely.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nightly import NIGHTLY
from support import fixtures

import jaxkv
from jaxkv.models import Decoder, DecoderConfig, Rope, config_reader

ON_GPU = jax.default_backend() == "gpu"
pytestmark = pytest.mark.skipif(not (ON_GPU or NIGHTLY), reason="needs a GPU, whose kernels it is about")
VOCAB = 96


def llama(head_dim=64, windows=(None, None), **fields):
    fields = dict(vocab_size=VOCAB, embed_dim=128, mlp_dim=160, num_heads=8, num_kv_heads=2, max_seq_len=512) | fields
    ropes = (Rope(),) * len(windows)
    return DecoderConfig(head_dim=head_dim, windows=windows, ropes=ropes, attention_scale=head_dim**-0.5, **fields)


def parse_fixture(name, **fields):
    return config_reader.parse(json.loads((fixtures.DATA / name / "config.json").read_text()) | fields)


LATENT = dict(kv_lora_rank=128, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, qk_head_dim=96, head_dim=64)
LATENT |= dict(hidden_size=128, first_k_dense_replace=3)  # no experts: rounding would choose others
DELTA = dict(hidden_size=128, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=64, mlp_only_layers=[0, 1, 2])
MODELS = {
    "llama": llama,
    "head_dim 80": lambda: llama(80),
    "windows and sinks": lambda: llama(windows=(24, None), sinks=True, attention_soft_cap=30.0),
    "latent": lambda: parse_fixture("deepseek_v3", **LATENT),
    "chosen tokens": lambda: parse_fixture(
        "deepseek_v32", **LATENT, index_topk=48, index_head_dim=96, mlp_layer_types=["dense"] * 3
    ),
    "states": lambda: parse_fixture("qwen3_next", **DELTA),
}
PLAIN = {name: (name, {}) for name in MODELS}
STORED = {kind: ("llama", {"dtype": kind}) for kind in ("int8", "float8_e4m3fn", "int4")}
WAYS = {
    "prefixes": ("llama", {"prefix_cache": True, "spill_bytes": 10**7}),
    "prefixes of windows": ("windows and sinks", {"prefix_cache": True}),
    "prefixes of states": ("states", {"prefix_cache": True}),
    "swapped": ("llama", {"num_blocks": 16, "swap": "always"}),
    "guesses": ("windows and sinks", {"draft_tokens": 3}),
}
CASES = PLAIN | STORED | WAYS
LENGTHS = (3, 70, 17, 41, 9, 100)
# Of logits whose standard deviation is about 1: how much less likely in float32 a token may be that bfloat16 chose.
MUCH, MUCH_IN_4_BITS = 0.5, 1.5


def random_model(config):
    """A model in bfloat16 whose activations are as large as a trained one's, and the same numbers in float32."""
    (graph, shapes), (high_graph, _) = (
        nnx.split(nnx.eval_shape(lambda dtype=dtype: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))))
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    rng = np.random.default_rng(0)

    def draw(path, x):
        inputs = math.prod(x.shape[:-1]) if "out" in str(path) else x.shape[-1]
        drawn = rng.normal(size=x.shape) * (0.1 if x.ndim < 2 else inputs**-0.5)
        return jnp.asarray(drawn + (x.ndim < 2 and "norm" in str(path)) * (1 - config.norm_offset), x.dtype)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    return nnx.merge(graph, params), nnx.merge(high_graph, jax.tree.map(lambda x: x.astype(jnp.float32), params))


@jax.jit
def logits_of(model, tokens):
    """Those after each token, by dense attention."""
    return model(tokens[None])[0][0]


@pytest.mark.parametrize("case", CASES)
def test_an_engine_chooses_what_float32_holds_likely(case):
    name, options = CASES[case]
    low, high = random_model(MODELS[name]())
    if "draft_tokens" in options:
        options = options | {"draft": low}
    engine = jaxkv.Engine(low, **{"max_seqs": 4, "max_seq_len": 128, "step_tokens": 64} | options)
    if ON_GPU:
        for layer, config in enumerate(low.layer_configs):
            if not config.is_recurrent:
                q = jax.ShapeDtypeStruct((4, 1, low.config.num_heads, config.head_dim), jnp.bfloat16)
                choice = jaxkv.explain(q, engine.cache, layer=layer, platform="cuda")
                assert choice.implementation == "gpu", choice.reason
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in LENGTHS]
    prompts += [prompts[-1][:70] + prompts[0]]
    found = []
    for _ in range(1 + bool(options.get("prefix_cache"))):  # in the second round all has been there before
        outputs = [[] for _ in prompts]
        for index, token in engine.stream(prompts, 16):
            outputs[index].append(token)
        found += zip(prompts, outputs, strict=True)
    behind = []  # the likeliest token
    for prompt, output in found:
        tokens = np.zeros(128, np.int32)
        tokens[: len(prompt) + len(output)] = prompt + output
        with jax.default_matmul_precision("highest"):
            logits = np.asarray(logits_of(high, tokens))[len(prompt) - 1 :][: len(output)]
        behind += (logits.max(-1) - logits[np.arange(len(output)), output]).tolist()
    behind = np.array(behind) / logits.std()
    assert np.isfinite(behind).all()
    assert behind.max() < (MUCH_IN_4_BITS if case == "int4" else MUCH), np.sort(behind)[-8:]
    stats = engine.stats()
    if "swap" in options:
        assert stats["swapped_out"] > 0
    if "prefix_cache" in options:
        assert stats["hits"] > 0
    if "draft_tokens" in options:
        assert stats["acceptance"] > 0.8
