"""`jaxkv.testing.record`: a trace of what blocks hold, and the page that plays it."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, Checksum

import jaxkv
from jaxkv.testing import Trace, record


def make(**fields):
    layers = [jaxkv.LayerConfig(num_kv_heads=1, head_dim=4)]
    return jaxkv.init(
        jaxkv.CacheConfig(layers=layers, max_seqs=3, max_seq_len=64, num_blocks=8, block_size=8, **fields)
    )


def data(trace):
    """What the page was given."""
    return json.loads(re.search(r"const trace = (.*);\n", trace.html())[1])


def test_frames_by_hand():
    cache = make()
    trace = Trace(cache.config)
    extend, fork, free = map(jax.jit, (jaxkv.extend, jaxkv.fork, jaxkv.free))  # cheaper than one by one
    cache = trace.add(extend(cache, jnp.array([19, 0, 8])), "prompts")
    cache = trace.add(fork(cache, jnp.array([0]), jnp.array([1])), "</script>", requests={0: 7, 1: 9}, on_host={4: 12})
    trace.add(free(cache, jnp.array([True, False, True])))
    assert trace.blocks_in_use.tolist() == [4, 5, 3] and trace.tokens.tolist() == [27, 46, 19]
    assert (trace.bytes_in_use == trace.blocks_in_use * cache.config.bytes_per_block).all()
    owners = trace.owners()
    assert owners.shape == (3, 8)
    assert [sorted(row.tolist()) for row in owners] == [
        [-1] * 4 + [0] * 3 + [2], [-3, -3, -1, -1, -1, 0, 1, 2], [-1] * 5 + [1] * 3,
    ]  # fmt: skip
    assert "3 frames, 5 blocks in use at the most" in repr(trace)
    page = trace.html()
    assert page.count("</script>") == 1  # a note does not end it
    shown = data(trace)
    assert [frame["used"] for frame in shown["frames"]] == [[4], [5], [3]]
    assert shown["frames"][1]["rows"] == [[0, 19, 7], [1, 19, 9], [2, 8, None]]
    assert shown["frames"][1]["host"] == [[4, 12]] and shown["frames"][1]["note"] == "</script>"
    for frame, squares in zip(shown["frames"], (f.groups[0] for f in trace.frames), strict=True):
        states = [tuple(shown["states"][i]) for i in frame["blocks"][0]]
        assert states == [([*s.rows], s.filled, s.first, s.kept) for s in squares]


def test_an_empty_trace_and_a_file(tmp_path):
    trace = Trace(make().config)
    assert trace.blocks_in_use.tolist() == [] and "0 frames" in repr(trace)
    page = trace.html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == page
    assert 'srcdoc="&lt;!doctype html' in trace._repr_html_()


def test_what_an_engine_did():
    engine = jaxkv.Engine(Checksum((None,)), max_seqs=2, max_seq_len=LONGEST, num_blocks=6, block_size=8, swap="always")
    prompts = [[*range(1, 17)], [*range(5, 25)], [3, 1, 4]]
    advance = engine._core.advance
    with record(engine) as trace:
        recorded = [*engine.stream(prompts, max_new_tokens=20)]
    assert engine._core.advance == advance
    assert trace.blocks_in_use.max() == 6 and trace.blocks_in_use[-1] == 0
    assert {number for f in trace.frames for number in f.requests.values()} == {0, 1, 2}
    assert any(f.on_host for f in trace.frames) and engine.stats()["swapped_out"]
    assert len(trace.frames) >= 20 and np.all(trace.tokens <= 6 * 8)
    assert sorted([*engine.stream(prompts, max_new_tokens=20)]) == sorted(recorded)
    assert len(trace.frames) == len(data(trace)["frames"])  # the recording is over
    with pytest.raises(ValueError, match="cannot be continued"), record(engine):
        engine.submit([])
    assert engine._core.advance == advance
