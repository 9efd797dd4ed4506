"""A cache's picture: every block once, in its row's colour, shared ones marked."""

import re

import jax

import jaxkv
from jaxkv._core.cache.block_map_html import FREE, MOST_BLOCKS, PALETTE

LAYER = jaxkv.LayerConfig(num_kv_heads=1, head_dim=4)


def make(num_blocks=12, **fields):
    return jaxkv.init(
        jaxkv.CacheConfig(layers=(LAYER,), max_seqs=3, max_seq_len=64, num_blocks=num_blocks, block_size=8, **fields)
    )


def squares(cache):
    return dict(re.findall(r'<div title="block (\d+): ([^"]*)"', cache._repr_html_()))


def test_every_block_says_who_holds_it_and_how_full_it_is():
    cache = jaxkv.fork(jaxkv.extend(make(), [19, 0, 8]), 0, 1)
    shown = squares(cache)
    assert len(shown) == 12
    assert sorted(shown.values()) == [
        *["free"] * 7,
        "row 0, 3 of 8 tokens, positions 16 to 18",
        "row 1, 3 of 8 tokens, positions 16 to 18",
        "row 2, 8 of 8 tokens, positions 0 to 7",
        "rows 0, 1, 8 of 8 tokens, positions 0 to 7, shared by 2",
        "rows 0, 1, 8 of 8 tokens, positions 8 to 15, shared by 2",
    ]


def test_reserved_and_kept_blocks_say_so():
    assert "row 2, 0 of 8 tokens, reserved" in squares(jaxkv.reserve(make(), [0, 0, 5])).values()
    cache, prefix = jaxkv.extend(make(), [16, 0, 0]), jaxkv.PrefixCache(make().config)
    cache = prefix.insert(cache, 0, [*range(16)])
    kept = [text for text in squares(cache).values() if "kept" in text]
    assert len(kept) == 2 and all(text.startswith("row 0, 8 of 8 tokens, positions") for text in kept)
    freed = [text for text in squares(jaxkv.free(cache, [0])).values() if text != "free"]
    assert len(freed) == 2 and all(text.startswith("kept for reuse, prefix ") for text in freed)


def test_columns_are_equal():
    assert "repeat(12,20px)" in make()._repr_html_() and "repeat(32,20px)" in make(num_blocks=100)._repr_html_()


def test_shared_blocks_have_all_colours_and_a_count():
    html = jaxkv.fork(jaxkv.extend(make(), [16, 0, 0]), 0, [1, 2])._repr_html_()
    (first, *_) = re.findall(r'<div title="block \d+: rows[^>]*>(\d*)</div>', html)
    assert first == "3"
    assert all(colour in html for colour in PALETTE[:3]) and FREE in html


def test_many_blocks_are_drawn_small():
    html = jaxkv.extend(make(num_blocks=4000), [64, 9, 0])._repr_html_()
    assert "repeat(64,10px)" in html and "grid-auto-rows:10px" in html and len(html) < 400_000
    assert len(re.findall(r'<div title="block', html)) == 4000


def test_it_has_the_colours_of_the_page():
    """No text or frame in black, no white ground: on a dark page they would not be seen, or be all that is."""
    html = jaxkv.fork(jaxkv.extend(make(), [19, 0, 8]), 0, 1)._repr_html_()
    assert "rgba(128" in FREE and not re.search(r"[^-]color:|#000|#eceff1|#fff", html)


def test_a_large_cache_is_not_drawn_in_full():
    html = make(num_blocks=MOST_BLOCKS + 10)._repr_html_()
    assert len(squares(make(num_blocks=MOST_BLOCKS + 10))) == MOST_BLOCKS and "and 10 more blocks" in html


def test_a_traced_cache_is_its_name():
    assert "traced" in jax.eval_shape(make)._repr_html_()
