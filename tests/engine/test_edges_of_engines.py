"""An engine's cache between steps, and logits in another dtype."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import Checksum, continuation
from flax import nnx
from nightly import NIGHTLY

import jaxkv
import jaxkv.models
from jaxkv._engine.requests.submission import read_stop
from jaxkv._engine.runner.fingerprint import fingerprint

WINDOWS = (None, 7)[: 1 + NIGHTLY]  # by day one layer, which is half of what there is to compile


def test_the_cache_is_sound_between_steps_where_windows_are_left():
    windows, prompt = (None, 7), [5, 7, 11, 2] * 8
    engine = jaxkv.Engine(Checksum(windows=windows), max_seqs=2, max_seq_len=48, block_size=2, step_tokens=16)
    request = engine.submit(prompt, 8)
    while not request.done:
        engine.step()
        jaxkv.check_invariants(engine.cache)
    assert request.tokens == continuation(windows, prompt, 8, None)


@pytest.mark.skipif(not NIGHTLY, reason="engines of its own to compile")
def test_beams_of_a_model_whose_logits_are_narrower():
    model = jaxkv.models.small()
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=32, num_blocks=8))
    cache = jaxkv.extend(cache, [3, 3])
    logits, cache = model(jnp.array([list(b"def")] * 2), cache=cache)
    wide, narrow = (
        jaxkv.beam_search(model, cache, logits[:, -1].astype(dtype), beams=2, max_new_tokens=3)[0].tokens
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert wide.shape == narrow.shape == (1, 2, 3)


def nothing_after(length):
    """A hook that leaves no token once a row is so long."""

    def hook(logits, rows):
        return jnp.where((rows.lengths >= length)[:, None], -jnp.inf, logits)

    return hook


@pytest.mark.parametrize(("steps", "temperature"), [(3, 1.0)] + NIGHTLY * [(1, 0.0), (1, 1.0), (3, 0.0)])
def test_logits_that_leave_no_choice_end_a_request(steps, temperature):
    room = dict(max_seqs=2, max_seq_len=48, block_size=8, steps_per_dispatch=steps)
    engine = jaxkv.Engine(Checksum(WINDOWS), **room, logits_hook=nothing_after(9))
    failed, fine = engine.submit([5, 7, 11, 2, 3], 8, temperature), engine.submit([5, 7], 6, temperature)
    news = list(engine.run())
    assert failed.done and len(failed.tokens) == 4 and "error" in repr(failed) and len(fine.tokens) == 6
    several = engine.submit([5, 7, 11, 2, 3], 8, temperature, n=2)
    list(engine.run())
    assert several.ended == "error" and several.error == several.samples[1].error == failed.error
    assert (failed.ended, fine.ended) == ("error", "length")
    assert failed.error.startswith("after 5 + 4 tokens the logits") and fine.error is None
    assert failed.error.endswith("no token can be chosen")  # its first token was: the prompt is not to blame
    assert [token for request, token in news if request is failed] == [*failed.tokens, None]
    jaxkv.check_invariants(engine.cache)
    assert not engine.cache.num_tokens
    tokens = engine.stream([[5, 7, 11, 2, 3]], 8, temperature)
    assert len([next(tokens) for _ in range(4)]) == 4
    with pytest.raises(FloatingPointError, match="Sequence 0 cannot go on: after 5 \\+ 4 tokens"):
        next(tokens)
    assert not engine._core.is_busy


class Embedded(nnx.Module):
    """A model of Flax's Embed, which reads a token outside its vocabulary as NaN."""

    def __init__(self):
        self.embed = nnx.Embed(11, 8, rngs=nnx.Rngs(0))
        self.layer_configs, self.dtype = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=8),), "float32"

    def __call__(self, tokens, cache):
        x = self.embed(tokens)
        out, cache = jaxkv.attention(*[x[..., None, :]] * 3, cache, layer=0)
        return self.embed.attend(out[..., 0, :]), cache


def test_logits_of_a_token_outside_the_vocabulary_say_so():
    engine = jaxkv.Engine(Embedded(), max_seqs=2, max_seq_len=16)
    request = engine.submit([3, 99, 5], 4)
    with pytest.raises(FloatingPointError, match="the prompt's token ids go from 3 to 99, and one outside the vocab"):
        request.result()
    engine.vocab_size = 11  # as of a model with a config, whose prompts were looked at
    assert request.error.endswith("no token can be chosen")


@pytest.mark.skipif(not NIGHTLY, reason="two engines of a real model to compile")
def test_a_draft_whose_logits_are_none_costs_no_token():
    model = jaxkv.models.small()
    broken = nnx.clone(model)
    nnx.update(broken, jax.tree.map(lambda x: x * jnp.nan, nnx.state(broken)))
    prompt = list(b"import ")
    expected = jaxkv.generate(model, [prompt], 6)
    assert jaxkv.generate(model, [prompt], 6, draft=broken, draft_tokens=2) == expected
    with pytest.raises(FloatingPointError, match="NaN or all -inf"):
        jaxkv.generate(broken, [prompt], 6)


def test_stats_are_plain_numbers():
    engine = jaxkv.Engine(Checksum(WINDOWS), max_seqs=2, max_seq_len=48, block_size=8, prefix_cache=True)
    engine.submit([5, 7] * 10, 3)
    list(engine.run())
    assert json.loads(json.dumps(engine.stats()))["blocks"] and json.dumps(jaxkv.stats(engine.cache))


@pytest.mark.skipif(not NIGHTLY, reason="engines of its own to compile")
def test_a_mesh_with_an_axis_for_contexts_alone(tmp_path):
    """What it spills, and what comes back from files, lies side by side in a prompt's blocks."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("context",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    room = dict(max_seqs=1, max_seq_len=48, block_size=8, num_blocks=7, step_tokens=16)
    model = jax.device_put(jaxkv.models.small(), place)
    config = jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=48, block_size=8)
    kept = dict(prefix_cache=True, spill_bytes=5 * config.bytes_per_block, disk=tmp_path, disk_bytes=10**7)
    engine = jaxkv.Engine(model, **room, **kept)
    assert engine.cache.pools[0].context == "context" and len(engine.cache.pools[0].kv.devices()) == 2
    prompts = [[*range(n, n + 34)] for n in (0, 40, 80)]
    alone = jaxkv.generate(jaxkv.models.small(), prompts, 4)
    for i in (0, 1, 2, 0, 1, 2):
        request = engine.submit(prompts[i], 4)
        list(engine.run())
        assert request.tokens == alone[i]
    stats = engine.stats()
    assert stats["disk_blocks_read"] and stats["blocks_restored"] > stats["disk_blocks_read"]


def test_models_of_equal_arrays_are_told_apart():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Model:
        w: Any
        add: float = 0.0
        theta: float = dataclasses.field(metadata={"static": True}, default=1e4)

    w = jnp.ones(3)
    models = Model(w), Model(w, add=3.0), Model(w, theta=1e6), Model(w, add=np.float32(3))
    assert len({fingerprint(model) for model in models}) == 4
    assert fingerprint(Model(w, theta=len)) == fingerprint(Model(w, theta=len))
    assert fingerprint(Model(w, theta=lambda x: x)) == fingerprint(Model(w, theta=lambda x: x))  # not by their address


def test_a_request_with_a_seed_of_its_own_draws_the_same_whatever_came_before(tmp_path):
    model, prompt = jaxkv.models.small(), list(b"import ")
    expected = jaxkv.generate(model, [prompt], 8, 1.0, seed=5, n=2)[0]
    fields = dict(max_seqs=3, max_seq_len=64, seed=1)
    engine, other = jaxkv.Engine(model, **fields), jaxkv.Engine(model, **fields)
    unlike = [engine.submit(prompt, 8, 1.0) for _ in range(2)]
    request = engine.submit(prompt, 8, 1.0, seed=5, n=2)
    for _ in range(4):
        engine.step()
    engine.save(tmp_path / "engine")
    list(engine.run())
    restored = other.load(tmp_path / "engine")
    list(other.run())
    assert [sample.tokens for sample in request.samples] == expected and request.tokens != unlike[0].tokens
    assert unlike[0].tokens != unlike[1].tokens
    assert [r.tokens for r in restored] == [r.tokens for r in (*unlike, *request.samples)]
    assert engine.recompute(prompt, expected[1], index=1, temperature=1.0, seed=5) == expected[1]
    for seed in ("a", 1.5, 10**30):
        with pytest.raises(ValueError, match="seed must be "):
            engine.submit(prompt, seed=seed)


def test_why_a_request_has_ended(tmp_path):
    prompt, fields = [5, 7, 11, 2], dict(max_seqs=4, max_seq_len=48, block_size=8)
    tokens = continuation(WINDOWS, prompt, 8, None)
    engine = jaxkv.Engine(Checksum(WINDOWS), **fields)
    requests = [
        engine.submit(prompt, 8), engine.submit(prompt, 8, eos=tokens[3]), engine.submit(prompt, 30),
        engine.submit(prompt, 8, n=2), engine.submit(prompt, 100),
    ]  # fmt: skip
    assert {request.ended for request in requests} == {None}
    engine.step()
    requests[2].cancel()
    list(engine.run())
    assert [request.ended for request in requests] == ["length", "eos", "cancelled", "length", "length"]
    assert all(request.done for request in requests)
    engine.save(tmp_path / "engine")
    restored = jaxkv.Engine(Checksum(WINDOWS), **fields).load(tmp_path / "engine")
    assert {request.ended for request in restored} <= {"length", "eos", "cancelled"}
    assert (read_stop(True), read_stop(False), read_stop(None)) == ("eos", None, None)  # as engines once saved it
    for junk in ("why", 1, []):
        with pytest.raises(ValueError, match="stopped must be True or False"):
            read_stop(junk)
