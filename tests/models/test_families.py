"""A family is a module of its own, and a decoder's layers are `LayerConfig`s that may differ."""

import ast
import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv import LayerConfig
from jaxkv.models import Decoder, DecoderConfig, Rope, config
from jaxkv.models.config import LatentConfig, PerLayerConfig
from jaxkv.models.families import FAMILIES
from jaxkv.models.mixers.block_config import BlockConfig

MODELS = pathlib.Path(config.__file__).parent
CONFIG = DecoderConfig(
    vocab_size=16, embed_dim=8, mlp_dim=8, num_heads=4, num_kv_heads=2, head_dim=4, max_seq_len=32,
    windows=(None, 4), ropes=(Rope(),) * 2, attention_scale=0.5,
)  # fmt: skip
LATENT = LatentConfig(rank=4, rope_dim=2, nope_dim=2, value_dim=2)


def compared_names(source):
    """The names and attributes that a source file compares, or looks up in what it compares with."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for part in (node.left, *node.comparators):
                yield from (n.attr for n in ast.walk(part) if isinstance(n, ast.Attribute))
                yield from (n.id for n in ast.walk(part) if isinstance(n, ast.Name))


def test_only_a_family_s_own_module_asks_for_the_family():
    for file in MODELS.rglob("*.py"):
        if MODELS / "families" not in file.parents:
            assert "family" not in set(compared_names(file.read_text())), file
    assert "family" in set(compared_names("if config.family == 'x': pass"))


def test_modules_are_short_and_registered():
    files = {file.stem: file for file in (MODELS / "families").glob("*/*.py") if file.stem != "__init__"}
    registered = {family.parse.__module__.rpartition(".")[2] for family in FAMILIES.values()}
    assert files.keys() == registered
    assert all(len(file.read_text().splitlines()) <= 150 for file in files.values())


def test_layers_may_be_given_themselves():
    layer = LayerConfig(num_kv_heads=2, head_dim=4)
    given = dataclasses.replace(CONFIG, layers=(layer, dataclasses.replace(layer, window=4)))
    assert given == CONFIG and hash(given) == hash(CONFIG)
    assert (CONFIG.windows, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.period) == ((None, 4), 2, 4, 2)
    wider = dataclasses.replace(CONFIG, windows=(3,) * 5, ropes=(Rope(),) * 5)
    assert wider.num_layers == 5 and set(wider.windows) == {3} and wider.num_kv_heads == 2
    assert dataclasses.replace(CONFIG, num_kv_heads=4).layers[1] == LayerConfig(num_kv_heads=4, head_dim=4, window=4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(heads=3), "DecoderConfig has no heads"),
        (dict(head_dim=3), "head_dim must be even"),
        (dict(num_kv_heads=3), "4 query heads cannot be shared among 3 KV heads"),
        (dict(layers=CONFIG.layers[:1]), "one entry per layer, but they have 1 and 2"),
        (dict(blocks=(BlockConfig(), BlockConfig(num_heads=3))), "3 query heads cannot be shared among 2 KV heads"),
        (dict(blocks=(BlockConfig(), BlockConfig(num_heads=3)), latent=LATENT), "same number of query heads"),
        (dict(activation="tanh"), "'relu2' or 'xielu', not 'tanh'"),
        (dict(activation="xielu", per_layer=PerLayerConfig(dim=2, vocab_size=16)), "of MLPs alone"),
        (dict(attention_gate_by="token"), "attention_gate_by must be 'entry' or 'head', not 'token'"),
        (dict(attention_gate_activation="relu"), "attention_gate_activation must be 'sigmoid' or 'softplus'"),
    ],
)
def test_bad_arguments(change, says):
    with pytest.raises((ValueError, TypeError), match=says):
        dataclasses.replace(CONFIG, **change)
    with pytest.raises(TypeError, match="lacks layers, or in their place num_kv_heads, head_dim, windows"):
        DecoderConfig(vocab_size=3)
    with pytest.raises(TypeError, match="lacks vocab_size, embed_dim"):
        DecoderConfig(layers=CONFIG.layers)


def test_layers_of_unequal_heads_and_widths():
    """Paged, in two steps, what is computed densely."""
    layers = (LayerConfig(num_kv_heads=2, head_dim=4, window=3), LayerConfig(num_kv_heads=1, head_dim=8))
    model = Decoder(dataclasses.replace(CONFIG, layers=layers), rngs=nnx.Rngs(0))
    tokens = np.arange(8, dtype=np.int32)[None]
    wanted, _ = model(jnp.asarray(tokens))
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=8, block_size=4))
    for start in (0, 4):
        chunk = jnp.asarray(tokens[:, start : start + 4])
        logits, cache = model(chunk, cache=jaxkv.extend(cache, [4]))
        np.testing.assert_allclose(logits, wanted[:, start : start + 4], atol=1e-5)
