"""The arithmetic of a config with groups: what fits into a number of bytes, and what follows from what."""

import dataclasses

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given, settings

import jaxkv
import jaxkv.testing
from jaxkv import CacheConfig, LayerConfig
from jaxkv._core.config.retention import Window

WIDE, LOCAL = LayerConfig(num_kv_heads=2, head_dim=8), LayerConfig(num_kv_heads=1, head_dim=4, window=40)
FIELDS = {"max_seqs": 4, "max_seq_len": 1000, "dtype": "float32"}


def make_config(layers=(WIDE, LOCAL, LOCAL), **fields):
    if not {"num_blocks", "max_tokens", "group_blocks"} & fields.keys():
        fields["num_blocks"] = 20
    return CacheConfig(layers=layers, **(FIELDS | fields))


LAYER = st.builds(
    LayerConfig,
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 70),
    window=st.sampled_from([None, 1, 7, 40, 200]),
    dtype=st.sampled_from([None, "float16", "float32"]),
)


@given(
    layers=st.lists(LAYER, min_size=1, max_size=5),
    block_size=st.sampled_from([1, 5, 16, 64]),
    step_tokens=st.sampled_from([None, 1, 100, 5000]),
    multiple=st.sampled_from([1, 128]),
    factor=st.floats(1, 300),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_never_more_than_the_bytes_and_one_block_more_would_be(layers, block_size, step_tokens, multiple, factor):
    config = make_config(tuple(layers), block_size=block_size, head_dim_multiple=multiple)
    memory = factor * 2 * config.bytes_per_block
    fits = config.with_memory(memory, step_tokens=step_tokens)
    assert fits.bytes <= memory
    widest = max(range(len(fits.groups)), key=lambda g: fits.group_windows[g] or float("inf"))
    for g, (window, num_blocks) in enumerate(zip(fits.group_windows, fits.group_blocks, strict=True)):
        if g == widest or window is None:
            assert num_blocks == fits.num_blocks
        else:
            assert num_blocks == min(fits.num_blocks, config.window_blocks(Window(window), step_tokens))
    # One block more for every group that is not held back by its window.
    one_more = fits.replace(
        group_blocks=tuple(
            n + 1 if g == widest or window is None or n < config.window_blocks(Window(window), step_tokens) else n
            for g, (window, n) in enumerate(zip(fits.group_windows, fits.group_blocks, strict=True))
        )
    )
    assert one_more.bytes > memory
    assert (fits.layers, fits.block_size, fits.max_seqs, fits.max_seq_len) == (
        config.layers, config.block_size, config.max_seqs, config.max_seq_len,
    )  # fmt: skip


def test_its_bytes_are_those_of_the_pools():
    config = make_config(head_dim_multiple=16).with_memory(200_000, step_tokens=64)
    assert jaxkv.init(config).bytes == config.bytes <= 200_000


def test_the_least_is_one_block_in_every_group():
    config = make_config()
    least = 2 * config.bytes_per_block
    assert config.with_memory(least).group_blocks == (1, 1)
    with pytest.raises(ValueError, match=f"memory_bytes={least - 1} is too little: one block of 16 tokens takes"):
        config.with_memory(least - 1)


def test_windows_leave_more_for_the_others():
    config, memory = make_config(), 3_000_000
    together, apart = config.with_memory(memory), config.with_memory(memory, step_tokens=64)
    assert apart.group_blocks[1] == config.window_blocks(Window(40), 64) < together.group_blocks[1]
    assert apart.group_blocks[0] > together.group_blocks[0]


class Model:
    layer_configs, dtype = (LOCAL, WIDE, LOCAL), "float32"


def test_from_model():
    sizes = {"max_seqs": 4, "max_seq_len": 1000}
    every = 4 * 63
    assert CacheConfig.from_model(Model, **sizes).group_blocks == (every, every)
    windowed = CacheConfig.from_model(Model, **sizes, step_tokens=64)
    assert windowed.group_blocks == (windowed.window_blocks(Window(40), 64), every)
    assert windowed.groups == ((0, 2), (1,))
    assert CacheConfig.from_model(Model, **sizes, num_blocks=9, step_tokens=64).group_blocks == (9, 9)
    assert CacheConfig.from_model(Model, **sizes, group_blocks=(5, 7)).group_blocks == (5, 7)
    assert CacheConfig.from_model(Model, **sizes, memory_bytes=100_000, step_tokens=64).bytes <= 100_000
    assert CacheConfig.from_model(Model, **sizes, layout="contiguous").group_blocks == (4,)
    by_tokens = CacheConfig.from_model(Model, **sizes, max_tokens=100)
    assert by_tokens.group_blocks == (7, 7) and by_tokens.max_tokens == 100
    by_tokens = CacheConfig.from_model(Model, **sizes, max_tokens=3990, step_tokens=64)
    assert by_tokens.group_blocks == (windowed.group_blocks[0], 250)
    for name, value in (("num_blocks", 9), ("max_tokens", 144), ("group_blocks", (5, 7))):
        with pytest.raises(ValueError, match=f"takes memory_bytes or {name}, not both"):
            CacheConfig.from_model(Model, **sizes, **{name: value}, memory_bytes=100_000)
        assert CacheConfig.from_model(Model, **sizes, **{name: None}).group_blocks == (every, every)
    with pytest.raises(ValueError, match="max_tokens must be an integer, not 'x'"):
        CacheConfig.from_model(Model, **sizes, max_tokens="x")
    with pytest.raises(ValueError, match=r"max_tokens is 4000 in the contiguous layout .* not 100: leave it out"):
        CacheConfig.from_model(Model, **sizes, max_tokens=100, layout="contiguous")


def test_window_blocks():
    config = make_config(block_size=4)
    assert config.window_blocks(Window(6)) == 4 * 250, "without step_tokens a step may fill the row"
    assert config.window_blocks(Window(6), 10**9) == 4 * 250
    assert config.window_blocks(Window(6), 8) == (4 * (5 + 3 + 3) + 8) // 4
    assert config.window_blocks(Window(1), 8) == config.window_blocks(Window(2), 8), "the last block always stays"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_seqs": 7}, {"max_seqs": 7, "group_blocks": (20, 20), "max_tokens": 320}),
        ({"num_blocks": 9}, {"group_blocks": (9, 9), "max_tokens": 144}),
        ({"max_tokens": 100}, {"num_blocks": 7, "group_blocks": (7, 7), "max_tokens": 100}),
        ({"group_blocks": (5, 8)}, {"num_blocks": 8, "max_tokens": 128}),
        ({"block_size": 8}, {"num_blocks": 20, "max_tokens": 160, "group_blocks": (20, 20)}),
        ({"layers": (WIDE,)}, {"num_blocks": 20, "group_blocks": (20,), "groups": ((0,),)}),
        ({"dtype": "bfloat16"}, {"group_blocks": (20, 20), "num_blocks": 20}),
        ({"layout": "contiguous"}, {"num_blocks": 4, "group_blocks": (4,), "block_size": 1000, "max_tokens": 4000}),
    ],
)
def test_replace(changes, expected):
    config = make_config()
    changed = config.replace(**changes)
    for field, value in (changes | expected).items():
        assert getattr(changed, field) == value, field
    assert config == make_config(), "the first one is as it was"


def test_replace_in_the_contiguous_layout():
    config = CacheConfig(layers=(WIDE, LOCAL), layout="contiguous", **FIELDS)
    longer = config.replace(max_seq_len=2000, max_seqs=2)
    assert (longer.block_size, longer.num_blocks, longer.max_tokens, longer.group_blocks) == (2000, 2, 4000, (2,))
    paged = config.replace(layout="paged", max_tokens=160)
    assert (paged.block_size, paged.group_blocks, paged.groups) == (16, (10, 10), ((0,), (1,)))


def test_replace_keeps_the_groups_own_blocks():
    config = make_config(group_blocks=(30, 12))
    assert config.replace(max_seq_len=500).group_blocks == (30, 12)
    assert config.replace(num_blocks=30).group_blocks == (30, 30)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"group_blocks": (3,)}, r"one number for each of the 2 groups of layers \(windows \(None, 40\)\), not 1"),
        ({"group_blocks": (3, 0)}, "group_blocks must be at least 1, not 0"),
        (
            {"group_blocks": (3, 4), "num_blocks": 5},
            "num_blocks is the largest of group_blocks, 4, not 5: leave it out",
        ),
    ],
)
def test_bad_input_is_one_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_config(**fields)


def test_configs_are_equal_by_value():
    config = make_config()
    assert dataclasses.replace(config) == config and hash(dataclasses.replace(config)) == hash(config)


@pytest.mark.parametrize(("platform", "stored"), [("cpu", 80), ("gpu", 128), ("tpu", 128)])
def test_head_dim_is_stored_as_the_platform_wants_it(monkeypatch, platform, stored):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=80)
    config = jaxkv.CacheConfig(layers=(layer,), max_seqs=1, max_tokens=64)
    assert config.pool_shape(0)[-1] == stored
    assert config.replace(num_blocks=2).pool_shape(0)[-1] == stored
    assert config.replace(head_dim_multiple=1).pool_shape(0)[-1] == 80


@pytest.mark.parametrize(("dtype", "width"), [("float32", 80), ("int8", 80), ("int4", 40)])
def test_poison_spares_what_pads_heads(dtype, width):
    """A kernel may read it beside the numbers, and a write in XLA does not write it."""
    layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=80)
    config = jaxkv.CacheConfig(layers=(layer,), max_seqs=1, max_tokens=64, dtype=dtype, head_dim_multiple=128)
    kv = jaxkv.testing.poison(jaxkv.init(config)).pools[0].kv[1:]
    assert kv.shape[-1] > width and (kv[..., :width] != 0).all() and (kv[..., width:] == 0).all()
