"""Every family's tiny checkpoint computes what transformers computes from it, densely and through the paged cache."""

import functools
import json
import math

import jax
import numpy as np
import pytest
from nightly import NIGHTLY
from support import fixtures

import jaxkv
from jaxkv import models
from jaxkv._files import safetensors
from jaxkv.models import config_reader

load = functools.cache(lambda name: models.load(fixtures.DATA / name))
PACKED = 32  # places of a packed step: less than the prompts have together


@jax.jit
def dense(model, tokens):
    return model(tokens)[0]


@functools.partial(jax.jit, donate_argnames="cache")
def step(model, tokens, counts, cache):
    cache = jaxkv.extend(cache, counts)
    return model(tokens, cache=cache)


def block_size_of(model):
    """Blocks of few tokens, of whole entries in layers that compress."""
    return math.lcm(4, *(layer.compress_ratio or 1 for layer in model.layer_configs))


def new_cache(model, **fields):
    fields = dict(max_seqs=fixtures.ROWS, max_seq_len=40, num_blocks=60, block_size=block_size_of(model)) | fields
    return jaxkv.init(jaxkv.CacheConfig.from_model(model, **fields))


@pytest.mark.parametrize("name", fixtures.NAMES)
def test_dense(name):
    wanted = fixtures.expected(name)
    tokens = np.zeros((len(wanted), max(len(e.read) for e in wanted)), np.int32)
    for row, e in zip(tokens, wanted, strict=True):
        row[: len(e.read)] = e.read
    logits = np.asarray(dense(load(name), tokens))
    for row, e in zip(logits, wanted, strict=True):
        fixtures.assert_close(row[: len(e.read)], e.logits)
        assert row[len(e.prompt) - 1 : len(e.read)].argmax(-1).tolist() == e.tokens.tolist()


# A few that together have every kind of layer; dense, all have been seen.
DAY = [
    "gemma2", "deepseek_v2", "gpt_oss", "llama4", "gemma4", "qwen3_next", "lfm2", "nemotron_h", "falcon_h1",
    "glm_moe_dsa",
]  # fmt: skip


@pytest.mark.parametrize("name", fixtures.NAMES if NIGHTLY else DAY)
def test_packed_and_paged(name):
    """Five prompts together, in chunks: some rows decode while others still read their prompts."""
    model, wanted = load(name), fixtures.expected(name)
    cache = new_cache(model)
    texts = [e.prompt.tolist() for e in wanted]
    logits = [[] for _ in wanted]
    while any(len(done) < len(e.read) for done, e in zip(logits, wanted, strict=True)):
        room, counts, tokens = PACKED, [], []
        for text, done, e in zip(texts, logits, wanted, strict=True):
            counts.append(min(len(text) - len(done), len(e.read) - len(done), 7, room))
            room -= counts[-1]
            tokens += text[len(done) : len(done) + counts[-1]]
        tokens = np.array(tokens + [10**6] * room, np.int32)  # padding may hold anything
        out, cache = step(model, tokens, np.array(counts, np.int32), cache)
        start = 0
        for text, done, count, e in zip(texts, logits, counts, wanted, strict=True):
            done.extend(np.asarray(out[start : start + count]))
            start += count
            if count and len(done) == len(text) < len(e.read):
                text.append(int(done[-1].argmax()))
    jaxkv.check(cache)
    for text, done, e in zip(texts, logits, wanted, strict=True):
        fixtures.assert_close(np.stack(done), e.logits)
        assert text[len(e.prompt) :] == e.tokens[:-1].tolist()
        assert done[-1].argmax() == e.tokens[-1]
    assert cache.lengths.tolist() == [len(e.read) for e in wanted]


@pytest.mark.parametrize("name", fixtures.NAMES if NIGHTLY else ["mistral", "lfm2", "glm_moe_dsa"])
def test_generate(name):
    """Prompts in chunks, with so few blocks that rows are set back and resumed, and one by one: the same tokens."""
    wanted = fixtures.expected(name)
    model, size = load(name), block_size_of(load(name))
    # Where all layers have a window, rows give blocks back.
    keeps_all = any(x.retention.visible_tokens is None for x in model.layer_configs if not x.is_recurrent)
    num_blocks = (44 if keeps_all else 28) // size
    engine = jaxkv.Engine(model, max_seqs=8, max_seq_len=40, block_size=size, num_blocks=num_blocks, step_tokens=8)
    prompts, count = [e.prompt.tolist() for e in wanted], len(wanted[0].tokens)
    outputs = [[] for _ in prompts]
    for index, token in engine.stream(prompts, count):
        outputs[index].append(token)
    assert outputs == [e.tokens.tolist() for e in wanted]
    assert engine.set_back > 0
    for prompt, e in zip(prompts, wanted, strict=True):
        assert [token for _, token in engine.stream([prompt], count)] == e.tokens.tolist()


@pytest.mark.parametrize("name", ["gemma3", "llama3"] if NIGHTLY else ["llama3"])
def test_padded_and_paged(name):
    model, wanted = load(name), fixtures.expected(name)
    lengths = np.array([len(e.prompt) for e in wanted], np.int32)
    tokens = np.full((len(wanted), lengths.max()), -1, np.int32)
    for row, e in zip(tokens, wanted, strict=True):
        row[: len(e.prompt)] = e.prompt
    logits, cache = step(model, tokens, lengths, new_cache(model))
    for row, e in zip(np.asarray(logits), wanted, strict=True):
        fixtures.assert_close(row[: len(e.prompt)], e.logits[: len(e.prompt)])
    ones = np.ones(len(wanted), np.int32)
    for t in range(len(wanted[0].tokens) - 1):
        logits, cache = step(model, np.array([[e.tokens[t]] for e in wanted], np.int32), ones, cache)
        for row, e in zip(np.asarray(logits), wanted, strict=True):
            fixtures.assert_close(row[0], e.logits[len(e.prompt) + t])


@pytest.mark.parametrize("name", fixtures.NAMES)
def test_the_old_form_of_a_config_means_the_same(name):
    old = config_reader.parse(json.loads((fixtures.DATA / name / "config_old.json").read_text()))
    assert old == load(name).config


@pytest.mark.parametrize("name", fixtures.NAMES)
def test_save_and_load(name, tmp_path):
    """What is saved is read again as the same model, weight by weight."""
    model = load(name)
    models.save(model, tmp_path)
    again = models.load(tmp_path)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again, model)


# Families whose published names are not those of transformers' modules, or whose files have more than parameters.
@pytest.mark.parametrize(
    "name",
    ["apertus", "axk1", "deepseek_v4", "ernie4_5_moe", "exaone_moe", "hy_v3", "kolibri1", "laguna", "lfm3",
     "mimo_v2_flash"],
)  # fmt: skip
def test_what_is_saved_has_the_names_of_what_was_published(name, tmp_path):
    models.save(load(name), tmp_path)
    saved, published = (safetensors.read(folder / "model.safetensors") for folder in (tmp_path, fixtures.DATA / name))
    assert {key: x.shape for key, x in saved.items()} == {key: x.shape for key, x in published.items()}


def test_one_checkpoint_is_in_several_files():
    assert len(list((fixtures.DATA / "qwen3").glob("*.safetensors"))) > 1


def test_windows_and_ropes_differ_between_layers():
    """So that a fixture without alternating layers cannot pass for one with them."""
    for name in ("gemma2", "gemma3"):
        assert [window is None for window in load(name).config.windows] == [False, True, False, True]
    assert len(set(load("gemma3").config.ropes)) == 2
    assert [window is None for window in load("qwen2").config.windows] == [True, False, False]
