"""Families with layers that keep a state: through the cache what transformers computes, whatever a step's tokens."""

import json
import math
import shutil
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.test_checkpoints import load, new_cache, step
from nightly import NIGHTLY
from support import fixtures

import jaxkv
from jaxkv import models
from jaxkv._cli.main import main
from jaxkv._cli.plan.capacity import plan
from jaxkv._core.cache.inspection import format_bytes
from jaxkv._files import safetensors
from jaxkv.models import config_reader
from jaxkv.models.checkpoints.parameter_counts import count_parameters
from jaxkv.models.loader import read_config
from jaxkv.models.mixers import delta

CONFIGS = {name: read_config(fixtures.DATA / name) for name in fixtures.NAMES}
HYBRID = [name for name, config in CONFIGS.items() if any(block.mixer is not None for block in config.blocks)]
PUBLISHED = json.loads((fixtures.DATA / "hybrid.json").read_text())
KINDS = ("gate", "up", "down")
VALUES = [None, True, -1, 0, 1.5, "yes", [1], {}]
CHUNK = 8  # columns of a step; longest prompt 23


def read(name, columns):
    """Logits of every row's tokens, read in chunks of at most `columns`: by one row while others wait or decode."""
    wanted, model = fixtures.expected(name), load(name)
    cache, done = new_cache(model), [[] for _ in wanted]
    while any(len(out) < len(e.read) for out, e in zip(done, wanted, strict=True)):
        tokens, counts = np.full((len(wanted), columns), -1, np.int32), []
        for row, out, e in zip(tokens, done, wanted, strict=True):
            # A prompt in whole chunks; then one token at a time, so that rows at work on either are in one step.
            left = len(e.prompt) - len(out)
            counts.append(min(left, columns) if left > 0 else min(1, len(e.read) - len(out)))
            row[: counts[-1]] = e.read[len(out) : len(out) + counts[-1]]
        logits, cache = step(model, tokens, np.array(counts, np.int32), cache)
        for out, count, new in zip(done, counts, np.asarray(logits), strict=True):
            out.extend(new[:count])
    jaxkv.check(cache)
    jaxkv.check_invariants(cache)
    return done


# By day packed steps, as engines take them, are in test_checkpoints.
@pytest.mark.parametrize("columns", [CHUNK, 1, 32] if NIGHTLY else [CHUNK])
@pytest.mark.parametrize("name", HYBRID if NIGHTLY else ["qwen3_next"])
def test_one_long_step_chunks_and_single_tokens(name, columns):
    for logits, e in zip(read(name, columns), fixtures.expected(name), strict=True):
        fixtures.assert_close(np.stack(logits), e.logits)


@pytest.mark.parametrize("name", HYBRID)
def test_what_a_row_keeps(name):
    """The last inputs of convolutions in the model's dtype, and states in float32."""
    config = CONFIGS[name]
    layers = config.layers_in(jnp.bfloat16)
    recurrent = [layer for layer in layers if layer.is_recurrent]
    assert recurrent and len(layers) == len(config.layers)
    kinds = {array.name: array.dtype for layer in recurrent for array in layer.states}
    assert kinds.pop("conv") == "bfloat16" and set(kinds.values()) <= {"float32"}
    mixers = [block.mixer for block in config.blocks if block.mixer is not None]
    assert recurrent == [mixer.layer("bfloat16") for mixer in mixers]
    assert config.layers_in("float32") == config.layers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid"])
def test_a_delta_rule_multiplies_in_the_model_s_dtype(monkeypatch, name, dtype):
    """Kernels take many tokens at once in 16 bits: of queries and keys in float32 a GPU's took one after another."""
    taken, run = [], delta.mixers.gated_delta_rule

    def note(q, k, v, *args, **kwargs):
        taken.append({str(x.dtype) for x in (q, k, v)})
        return run(q, k, v, *args, **kwargs)

    monkeypatch.setattr(delta.mixers, "gated_delta_rule", note)
    model = nnx.eval_shape(lambda: models.Decoder(CONFIGS[name], dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    config = jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=64, num_blocks=8)

    def read(model, tokens):
        return model(tokens, cache=jaxkv.extend(jaxkv.init(config), jnp.array([20, 12], jnp.int32)))[0]

    jax.eval_shape(read, model, jax.ShapeDtypeStruct((32,), jnp.int32))
    assert taken and all(dtypes == {dtype} for dtypes in taken)


def test_experts_of_qwen_3_5_in_one_tensor(tmp_path):
    """As they are published: the outputs of all gates and of all `up`s, `[experts, outputs, inputs]`."""
    shutil.copytree(fixtures.DATA / "qwen3_5_moe", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = {name: np.array(x) for name, x in safetensors.read(path).items()}
    for i in range(2):
        prefix = f"model.layers.{i}.mlp.experts."
        gate, up, down = ([tensors.pop(f"{prefix}{n}.{kind}_proj.weight") for n in range(6)] for kind in KINDS)
        tensors[f"{prefix}gate_up_proj"] = np.concatenate([np.stack(gate), np.stack(up)], axis=1)
        tensors[f"{prefix}down_proj"] = np.stack(down)
    safetensors.write(path, tensors | {"mtp.norm.weight": np.ones(3, np.float32)})
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path / "model"), load("qwen3_5_moe"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_transformers_parameters_and_states(name):
    """As many parameters, and as many bytes a row, as the modules of transformers have."""
    fields, expected = PUBLISHED[name]["config"], PUBLISHED[name]["expected"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_reader.parse(fields)
    chosen = config.experts is not None and config.experts.choice_bias  # a buffer there, a parameter here
    buffers = config.experts.count * sum(config.expert_layers) if chosen else 0
    assert count_parameters(config) - buffers == expected["parameters"]
    states = [layer.state_bytes for layer in config.layers_in("bfloat16") if layer.is_recurrent]
    assert (len(states), sum(states)) == (expected["layers"], expected["row_bytes"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_mixers_are_divided_over_devices(name):
    """All but norms, low ranks and what no number divides evenly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_reader.parse(PUBLISHED[name]["config"])
    whole = count_parameters(config)
    assert 0.5 * whole <= count_parameters(config, 2) < 0.51 * whole


@pytest.mark.parametrize("name", ["qwen3.5-9b", "nemotron-3-nano-30b-a3b"])
def test_a_plan_counts_states_to_the_byte(name, tmp_path, capsys):
    """What is planned is what the cache of that config takes, and one row more would not fit."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    row = PUBLISHED[name]["expected"]["row_bytes"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = ["plan", "--model", str(tmp_path), "--memory", "80GB", "--dtype", "bfloat16", "--json"]
        assert main([*arguments, "--block-size", "16", "--mean-len", "4096", "--rest", "0"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(arguments[:-1]) == 0
        config = read_config(tmp_path)
    (option,) = found["options"]
    assert option["bytes_per_row"] == row
    model = types.SimpleNamespace(layer_configs=config.layers_in("bfloat16"), dtype="bfloat16")
    sizes = {key: x for key, x in found["suggestion"].items() if key != "dtype"}
    made = jaxkv.CacheConfig.from_model(model, **sizes)
    blocks = sum((n + 1) * made.bytes_per_group_block(g) for g, n in enumerate(made.group_blocks))
    assert made.bytes == option["bytes"] == blocks + (made.max_seqs + 1) * row <= found["memory"]["cache"]
    rows, each = option["rows"], math.ceil((4096 + 15 / 2) / 16)
    assert made.max_seqs == rows and made.group_blocks[0] >= rows * (each - 1)
    assert f"; {format_bytes(row)} of states a row)" in capsys.readouterr().out
    more = found["memory"]["cache"] - (rows + 2) * row
    assert more < (rows + 1) * each * made.bytes_per_group_block(0)


def test_too_little_memory_for_states_is_refused():
    layers = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=8), jaxkv.LayerConfig.recurrent(state=((4, 8), "float32")))
    found = plan(layers, 4_000, max_seq_len=64, max_seqs=3, block_size=4, dtype="float32", head_dim_multiple=1)
    cache = jaxkv.init(found.config)
    assert sum(x.nbytes for x in jax.tree.leaves((cache.pools, cache.states))) == found.config.bytes <= 4_000
    with pytest.raises(ValueError, match="are too little"):
        plan(layers, 4_000, max_seq_len=64, max_seqs=40, block_size=4, dtype="float32")


@pytest.mark.parametrize("name", HYBRID)
def test_a_field_of_the_wrong_kind_is_refused_or_read_and_written_again(name):
    """In one sentence that names the file; and what is read is what would be written."""
    fields = json.loads((fixtures.DATA / name / "config.json").read_text())
    inner = fields.get("text_config", {})
    tried = [{key: value} for key in fields for value in VALUES if key != "model_type"]
    tried += [{"text_config": inner | {key: value}} for key in inner for value in VALUES if key != "model_type"]
    refused = 0
    for change in tried:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = config_reader.parse(fields | change, "folder/config.json")
            except ValueError as error:
                refused += 1
                assert "folder/config.json" in str(error) and len(str(error)) < 500, (change, error)
            else:
                assert config_reader.parse(config_reader.render(config)) == config, change
    assert refused > len(tried) / 4


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("qwen3_next", {"linear_num_key_heads": 3}, "delta nets of .*: 4 heads of values cannot be shared among 3"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "at least one full_attention"),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16'.* knows 'float32'"),
        ("qwen3_5_moe", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("lfm2", {"use_pos_enc": False}, "use_pos_enc = False"),
        ("olmo_hybrid", {"linear_use_gate": False}, "linear_use_gate = False"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope = False"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [0], "kda_layers": [1, 2]}}, "name the 3 layers"),
        (
            "granitemoehybrid",
            {"mamba_n_groups": 3},
            "Mamba layers of .*: 4 heads cannot be divided into 3 groups: give a number",
        ),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ("nemotron_h", {"sliding_window": 8}, "sliding_window = 8"),
        ("nemotron_h", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type = "),
        ("falcon_h1", {"attn_layer_indices": [0]}, r"attn_layer_indices = \[0\]"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "a list of 5 numbers"),
        ("falcon_h1", {"time_step_limit": [1.0, 0.5]}, "time_step_limit = .*two numbers"),
        ("bamba", {"attn_layer_indices": None}, "attn_layer_indices = None"),
        ("bamba", {"layer_types": ["full_attention"] * 3}, "layer_types = "),
        ("lfm2_moe", {"layer_types": None}, "lacks the field layer_types"),
        ("lfm3", {"sliding_window": None}, "sliding_attention only with a sliding_window"),
    ],
)
def test_what_a_family_refuses(name, change, says):
    fields = json.loads((fixtures.DATA / name / "config.json").read_text())
    with pytest.raises(ValueError, match=says):
        config_reader.parse(fields | change)


def test_other_names_of_kinds_of_layers():
    for name, change in (
        ("falcon_h1", {"layers_block_type": ["hybrid"] * 2}),
        ("granitemoehybrid", {"layer_types": None, "layers_block_type": ["mamba", "attention", "mamba"]}),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]}),
    ):
        fields = json.loads((fixtures.DATA / name / "config.json").read_text())
        assert config_reader.parse(fields | change) == CONFIGS[name]
