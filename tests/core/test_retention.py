"""What layers keep, against a token that looks at each position by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._core.config import layer_config
from jaxkv._core.config.retention import Chunk, Evicted, Full, Window, _clip_below, make_retention

SEES = {
    Full(): lambda own, other: True,
    Window(1): lambda own, other: own - other < 1,
    Window(5): lambda own, other: own - other < 5,
    Window(5, 3): lambda own, other: own - other < 5,
    Chunk(4): lambda own, other: own // 4 == other // 4,
    Evicted("head"): lambda own, other: True,
}


@pytest.mark.parametrize("retention", SEES, ids=str)
def test_positions_and_blocks_that_stay(retention):
    lengths = np.arange(40)
    seen = [[other for other in range(n) if SEES[retention](n, other)] for n in lengths.tolist()]
    # A row's last block stays even if its tokens do not: it determines the next block's column.
    first = [min([*positions, max(n - 1, 0)]) for n, positions in zip(lengths.tolist(), seen, strict=True)]
    assert retention.first_visible_position(lengths).tolist() == first
    assert [int(retention.first_visible_position(n)) for n in lengths.tolist()] == first
    assert retention.first_visible_position(jnp.asarray(lengths, jnp.int32)).tolist() == first
    for size in (1, 3, 4, 7):
        assert retention.first_retained_block(lengths, size).tolist() == [position // size for position in first]
        slots = retention.row_slots(size)
        held = [(-(-n // size) - position // size) * size for n, position in zip(lengths.tolist(), first, strict=True)]
        assert slots is None if retention.visible_tokens is None else max(held) <= slots
        assert retention.sink_blocks(size) == (-(-3 // size) if retention == Window(5, 3) else 0)
        unit = retention.slide_blocks(size) * size
        assert all(SEES[retention](own, own - 1) == SEES[retention](own + unit, own + unit - 1) for own in range(1, 9))


def test_rows_have_a_table_for_each_head_only_if_heads_evict():
    assert [kept.num_tables(6) for kept in (*SEES, Evicted("layer"))] == [1, 1, 1, 1, 1, 6, 1]


@pytest.mark.parametrize(
    "owner, reader, fits",
    [
        (Full(), Window(3), True), (Full(), Chunk(3), True), (Window(5), Window(5), True),
        (Window(5), Window(6), False), (Window(5), Full(), False), (Window(5), Chunk(3), False),
        (Window(5, 2), Window(4, 2), True),
        (Window(5, 2), Window(4, 3), False), (Window(5), Window(5, 1), False), (Chunk(4), Chunk(4), True),
        (Chunk(4), Chunk(2), False), (Chunk(4), Window(2), False), (Chunk(4), Full(), False),
        (Evicted("layer"), Full(), True), (Evicted("layer"), Window(9), False), (Evicted("head"), Chunk(9), False),
    ],
)  # fmt: skip
def test_who_may_read_anothers_tokens(owner, reader, fits):
    assert (owner.reader_refusal(reader) is None) == fits


def test_options_make_one_rule():
    assert make_retention(None, None, None, None) == Full()
    assert make_retention(3, 2, None, None) == Window(3, 2)
    assert make_retention(None, None, 4, None) == Chunk(4)
    assert make_retention(None, None, None, "head") == Evicted("head")


class OneMore(Window):
    """Keeps one block more than it sees."""

    def first_retained_block(self, length, block_size):
        return _clip_below(super().first_retained_block(length, block_size) - 1)

    def row_slots(self, block_size):
        return super().row_slots(block_size) + block_size

    def slide_columns(self, block_size):
        return super().slide_columns(block_size) + 1


@pytest.mark.parametrize("window, sink_tokens, others", [(8, None, ()), (6, 5, (None,))])
def test_a_rule_is_what_its_class_says(monkeypatch, window, sink_tokens, others):
    """Blocks that stay, blocks to have and columns go by it alone: rows grow within what was promised."""
    monkeypatch.setattr(
        layer_config, "make_retention", lambda window, *_: OneMore(window, sink_tokens) if window else Full()
    )
    layers = [
        jaxkv.LayerConfig(num_kv_heads=1, head_dim=2, window=each, sink_tokens=sink_tokens if each else None)
        for each in (window, *others)
    ]
    sizes = {"max_seqs": 1, "max_seq_len": 64 if others else 8, "block_size": 4}
    config = jaxkv.CacheConfig(layers=layers, **sizes, num_blocks=64)
    promised = config.window_blocks(config.retentions[0], 1) if others else config.row_blocks(0, 60)
    config = config.replace(group_blocks=(promised, 64)[: len(layers)])
    cache, step = jaxkv.init(config), jax.jit(lambda cache: jaxkv.extend(cache, jnp.ones(1, jnp.int32)))
    for _ in range(60):
        cache = step(cache)
    jaxkv.check(cache)
    jaxkv.check_invariants(cache)
    assert cache.tables[0].peak == promised


@pytest.mark.parametrize(
    ("fields", "kept", "said"),
    [
        ({}, "all tokens", "without a window"),
        ({"window": 6}, "a window of 6 tokens", "with a window of 6"),
        ({"window": 6, "sink_tokens": 3}, "a window of 6 and 3 sink tokens", "with a window of 6 and 3 sink tokens"),
        ({"chunk": 8}, "chunks of 8 tokens", "with chunks of 8"),
        ({"evict": "head"}, 'what evict="head" leaves', 'with evict="head"'),
        ({"dtype": "int4"}, "all tokens", "without a window"),
    ],
)
def test_what_layers_keep_is_named(fields, kept, said):
    layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, **fields)
    residual = {"residual_length": 5} if "dtype" in fields else {}
    config = jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, block_size=4, num_blocks=32, **residual)
    newest = ["the newest 5 tokens (residual_length)"] * len(residual)
    assert list(map(config.name_kept, range(len(config.groups)))) == [kept, *newest]
    described = list(map(config.describe_group, range(len(config.groups))))
    assert described == [said, *(f"that keep {name}" for name in newest)]
