"""DeepSeek V3.2 and GLM-5, whose layers choose their tokens: configs, sizes, and an engine in the ways that it has.

Logits and tokens against transformers are in `test_checkpoints`, with prompts longer than what a token chooses.
"""

import functools
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from nightly import NIGHTLY
from support import fixtures

import jaxkv
from jaxkv import models
from jaxkv._cli.plan.decode_step import attention_work
from jaxkv.models import config_reader
from jaxkv.models.blocks.indexer import IndexInputs
from jaxkv.models.checkpoints.parameter_counts import count_parameters

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
# As they are published.
DEEPSEEK = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "transformers_version": "4.44.2", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
GLM = DEEPSEEK | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "head_dim": 64, "hidden_size": 6144,
    "index_n_heads": 32, "indexer_rope_interleave": True, "intermediate_size": 12288, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 202752, "num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 78,
    "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "vocab_size": 154880,
}  # fmt: skip
del GLM["rope_theta"], GLM["rope_scaling"]


@functools.cache
def load(name):
    return models.load(fixtures.DATA / name)


def test_published_configs():
    deepseek, glm = map(config_reader.parse, (DEEPSEEK, GLM))
    assert (deepseek.index.heads, deepseek.index.dim, deepseek.index.top_k) == (64, 128, 2048)
    assert not deepseek.index.interleaved and glm.index.interleaved
    assert {layer.index_dim for layer in (*deepseek.layers, *glm.layers)} == {128}
    assert deepseek.expert_layers == (False,) * 3 + (True,) * 58 and glm.num_layers == 78
    named = {k: v for k, v in DEEPSEEK.items() if "index" not in k and k != "architectures"}
    plain = config_reader.parse(named | {"model_type": "deepseek_v3"})
    indexer = 64 * 128 * 1536 + 128 * 7168 + 64 * 7168 + 2 * 128
    assert count_parameters(deepseek) - count_parameters(plain) == 61 * indexer
    assert plain.attention_scale == deepseek.attention_scale


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_that_are_counted(name):
    model = load(name)
    assert count_parameters(model.config) == sum(x.size for x in jax.tree.leaves(model))


SHARED = {"indexer_types": None, "num_hidden_layers": 7, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    "fields, wanted",
    [
        ({}, "FFFFFFF"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 2}, "FFSSFSS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFSF"),
        ({"index_topk_pattern": "FSSFFSS"}, "FSSFFSS"),
        ({"index_topk_pattern": ["full", "shared"] * 3 + ["full"]}, "FSFSFSF"),
        ({"indexer_types": ["full"] * 2 + ["shared"] * 5, "index_topk_freq": 2}, "FFSSSSS"),
    ],
)
def test_which_layers_have_an_indexer(fields, wanted):
    config = config_reader.parse(GLM | SHARED | fields)
    assert "".join("S" if layer.index_dim is None else "F" for layer in config.layers) == wanted


@pytest.mark.parametrize(
    "fields, says",
    [
        (GLM | {"indexer_types": ["shared"] * 78}, "a first layer that chooses for itself"),
        (GLM | {"indexer_types": ["full"] * 3}, "one of full, shared for each of the 78 layers"),
        (GLM | {"index_topk_pattern": "FX" * 39}, "F and S, one for each of the 78 layers"),
        (GLM | {"indexer_rope_interleave": False}, "indexer_rope_interleave = False"),
        (DEEPSEEK | {"indexer_rope_interleave": True}, "indexer_rope_interleave = True"),
        (DEEPSEEK | {"q_lora_rank": None}, "q_lora_rank = None"),
        (DEEPSEEK | {"index_head_dim": 32}, "an index_head_dim of qk_rope_head_dim or more"),
        (DEEPSEEK | {"index_topk": 0}, "index_topk"),
        (DEEPSEEK | {"layer_types": ["full_attention"] * 61}, "layer_types"),
        (DEEPSEEK | {"mlp_layer_types": ["sparse"] * 60 + ["dense"]}, "dense layers before all sparse ones"),
        (DEEPSEEK | {"mlp_bias": True}, "mlp_bias = True"),
    ],
)
def test_what_they_refuse(fields, says):
    with pytest.raises(ValueError, match=says):
        config_reader.parse(fields)


def test_a_plan_counts_what_a_token_reads():
    config = config_reader.parse(DEEPSEEK)
    cache = jaxkv.CacheConfig(layers=config.layers, max_seqs=1, max_seq_len=1 << 15, num_blocks=1 << 11, block_size=16)
    read, _, scored = attention_work(cache, 1 << 15, config.index)
    assert read == 61 * 2 * (2048 * 576 + (1 << 15) * 128)
    assert scored == 61 * 64 * 128 * (1 << 15)
    assert attention_work(cache, 1 << 15)[0] == 61 * 2 * (1 << 15) * 576
    assert attention_work(cache, 100, config.index)[0] == 61 * 2 * 100 * (576 + 128)


def test_a_plan_says_so(tmp_path, capsys):
    from jaxkv._cli.main import main

    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK))
    main(["plan", "--model", str(tmp_path), "--memory", "2TB", "--max-seq-len", "32768"])
    said = capsys.readouterr().out
    assert "in 61 layers index keys of 128, by which a token chooses the 2,048 that it reads" in " ".join(said.split())


SHAPES = ((16, 12), (16,), (12,))  # of an indexer's queries, weights and key of a token, in the fixtures


def test_short_rows_choose_nothing():
    """Where a row holds no more than what a token chooses, all of it is read as by any layer, by kernels too."""
    model = load("deepseek_v32")
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=model.config.index.top_k))
    tokens = np.arange(2, 8, dtype=np.int32)[None]
    indexer, given = model.layers[0].attention.indexer, IndexInputs(*(np.ones((1, 6, *x), np.float32) for x in SHAPES))
    assert indexer.choose(given, jaxkv.extend(cache, [6]), 0, None)[1] is None
    program = jax.jit(lambda model, tokens, cache: model(tokens, cache=jaxkv.extend(cache, [6])))
    logits, after = program(model, tokens, cache)
    np.testing.assert_allclose(logits[0], jax.jit(lambda model, tokens: model(tokens)[0])(model, tokens)[0], atol=1e-4)
    assert np.asarray(after.pools[0].index.keys[1]).any(), "index keys are stored all the same"


TIGHT = {"max_seqs": 3, "max_seq_len": 40, "block_size": 4, "num_blocks": 18, "step_tokens": 11}
ENGINES = {
    "prefixes, guesses": {"prefix_cache": True, "draft": "ngram"},
    "swapped, prefixes on the host": {"prefix_cache": True, "spill_bytes": 10**6, "swap": "always"},
    "several steps a dispatch": {"steps_per_dispatch": 3, "swap": "never"},
    "deterministic": {"deterministic": True},
    "prompts elsewhere": {"prefill": True},
    "on disk": {"prefix_cache": True, "spill_bytes": 5000, "disk": True, "disk_bytes": 10**6},
    "a draft model": {"draft": True, "draft_tokens": 2},
}


@pytest.mark.parametrize("name", ENGINES if NIGHTLY else ["prefixes, guesses"])
@pytest.mark.parametrize("family", FAMILIES if NIGHTLY else FAMILIES[1:])
def test_an_engine_gives_transformers_tokens(family, name, tmp_path):
    model, wanted, fields = load(family), fixtures.expected(family), dict(ENGINES[name])
    if "disk" in fields:
        fields["disk"] = tmp_path / "blocks"
    if "draft_tokens" in fields:
        fields["draft"] = model
    if "prefill" in fields:
        fields["prefill"] = models.load(fixtures.DATA / family, mesh=Mesh(np.array(jax.devices()[1:2]), ("model",)))
        model = models.load(fixtures.DATA / family, mesh=Mesh(np.array(jax.devices()[:1]), ("model",)))
    engine = jaxkv.Engine(model, **TIGHT | fields)
    for _ in range(2):
        requests = [engine.submit(e.prompt.tolist(), len(e.tokens)) for e in wanted]
        list(engine.run())
        assert [request.tokens for request in requests] == [e.tokens.tolist() for e in wanted]
    jaxkv.check_invariants(engine.cache)
    if "prefix_cache" in fields:
        assert engine.stats()["hits"]


@pytest.mark.skipif(not NIGHTLY, reason="compiles four engines")
@pytest.mark.parametrize("family", FAMILIES)
def test_over_heads_rows_and_after_a_restart(family, tmp_path):
    wanted = fixtures.expected(family)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    rows = Mesh(np.array(jax.devices()[:2]), ("data",))
    for model, fields in (
        (models.load(fixtures.DATA / family, mesh=mesh), {}),
        (models.load(fixtures.DATA / family, mesh=rows), {"max_seqs": 4, "num_blocks": 40}),
    ):
        engine = jaxkv.Engine(model, **TIGHT | fields)
        requests = [engine.submit(e.prompt.tolist(), len(e.tokens)) for e in wanted]
        list(engine.run())
        assert [request.tokens for request in requests] == [e.tokens.tolist() for e in wanted]
    engine = jaxkv.Engine(load(family), **TIGHT)
    for e in wanted:
        engine.submit(e.prompt.tolist(), len(e.tokens))
    for _ in range(6):
        engine.step()
    engine.save(tmp_path / "engine.safetensors")
    other = jaxkv.Engine(load(family), **TIGHT | {"block_size": 3, "num_blocks": 24})
    loaded = other.load(tmp_path / "engine.safetensors")
    list(other.run())
    for request in loaded:
        assert request.tokens == wanted[request.number].tokens.tolist()


def test_trees_and_eviction_are_refused():
    with pytest.raises(ValueError, match="layer 0 of the model chooses its tokens by index keys"):
        jaxkv.Engine(load("glm_moe_dsa"), **TIGHT, draft="ngram", draft_branches=2)
