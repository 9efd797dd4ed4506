"""`Engine.update`, `release` and `restore`: weights that change, and memory that a trainer takes meanwhile."""

import dataclasses
import gc
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checksum_model import Checksum, Several
from compiled import compiled
from cutting import Cut, CutAt
from flax import nnx
from nightly import NIGHTLY, skip_by_day

import jaxkv

WINDOWS = (None, 7)[: 1 + NIGHTLY]  # by day one layer, which is half of what there is to compile
SIZES = dict(max_seqs=3, max_seq_len=48, block_size=4, step_tokens=16)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9, 2, 6, 7, 7]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weighted:
    """A checksum model with parameters: its keys are the tokens and one number, its logits are turned by another."""

    shift: jax.Array
    turn: jax.Array
    windows: tuple[Any, ...] = dataclasses.field(metadata={"static": True}, default=WINDOWS)
    kind: Any = dataclasses.field(metadata={"static": True}, default=Checksum)
    dtype: Any = dataclasses.field(metadata={"static": True}, default="float32")

    @property
    def layer_configs(self):
        return Checksum(self.windows).layer_configs

    def __call__(self, tokens, *, cache, logits_at):
        logits, cache = self.kind(self.windows)(tokens + self.shift, cache=cache, logits_at=logits_at)
        return jnp.roll(logits, self.turn, axis=-1), cache


def weights(shift, turn=0):
    return Weighted(jnp.int32(shift), jnp.int32(turn))


def finish(engine, prompts=PROMPTS, count=8):
    requests = [engine.submit(prompt, count) for prompt in prompts]
    return [request.result() for request in requests]


@pytest.fixture(scope="module")
def wanted():
    """What engines of older and of newer weights give."""
    found = []
    for model in (weights(0), weights(2, 5)):
        with jaxkv.Engine(model, **SIZES) as engine:
            found.append(finish(engine))
    assert found[0] != found[1]
    return found


WAYS = {
    "plain": {}, "prefix cache": dict(prefix_cache=True, spill_bytes=10**5), "windows": dict(steps_per_dispatch=2),
    "disk": dict(prefix_cache=True, spill_bytes=10**5, disk_bytes=10**6),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["prefix cache", "disk"])
def test_other_weights_are_taken_without_a_compile(way, wanted, tmp_path):
    options = WAYS[way] | ({"disk": tmp_path} if way == "disk" else {})
    newer = weights(2, 5)
    with jaxkv.Engine(weights(0), **SIZES, **options) as engine:
        assert finish(engine) == wanted[0]
        if engine.prefix is not None:
            assert finish(engine) == wanted[0] and engine.stats()["hits"]
            engine.prefix.flush(engine.cache)
        arrays = {id(x) for x in jax.tree.leaves(engine.cache)} if engine.prefix is None else None
        hits = engine.stats().get("hits")
        compiled(lambda: engine.update(weights(1)))  # what emptying a prefix cache takes
        assert finish(engine) not in wanted

        def update_and_run():
            engine.update(newer)
            return finish(engine)

        found = []
        assert compiled(lambda: found.append(update_and_run())) == 0
        assert found == [wanted[1]]
        assert hits is None or engine.stats()["hits"] > 0
        assert arrays is None or engine.cache.config
        jaxkv.check_invariants(engine.cache)
    if way == "disk":  # a process of either weights finds its own blocks alone
        with jaxkv.Engine(weights(2, 5), **SIZES, **options) as engine:
            assert finish(engine) == wanted[1]
        with jaxkv.Engine(weights(0), **SIZES, **options) as engine:
            assert finish(engine) == wanted[0]


def test_running_requests_are_refused_or_begin_anew(wanted):
    with jaxkv.Engine(weights(0), **SIZES, prefix_cache=True) as engine:
        requests = [engine.submit(prompt, 8) for prompt in PROMPTS]
        follower = iter(requests[0])
        assert [next(follower), next(follower)] == wanted[0][0][:2]
        with pytest.raises(RuntimeError, match="3 requests are running, and would mix tokens"):
            engine.update(weights(2, 5))
        assert next(follower) == wanted[0][0][2], "nothing has changed"
        engine.update(weights(2, 5), restart=True)
        assert [r.tokens for r in requests] == [[]] * 3
        with pytest.raises(RuntimeError, match=r"has begun anew with other weights .* iterate over it once more"):
            next(follower)
        given = {}
        for request, token in engine.run():
            given.setdefault(request, []).append(token)
        assert [given[r] for r in requests] == [[*tokens, None] for tokens in wanted[1]]
        waits = engine.submit(PROMPTS[0], 8)  # nothing of it was computed: it may stay
        engine.update(weights(0))
        assert waits.result() == wanted[0][0]


def test_stops_texts_and_callbacks_begin_anew(wanted):
    class Letters:
        def stream(self, prompt=()):
            return jaxkv.text.tokenizer.TextStream(self, list(prompt))

        def decode(self, tokens, special=False):
            return "".join("abcdefghijklmnop"[token % 16] for token in tokens)

    newer, handed = wanted[1][0], []
    with jaxkv.Engine(weights(0), **SIZES) as engine:
        options = dict(stop=[newer[5:7]], tokenizer=Letters(), logprobs=1, n=2)
        request = engine.submit(PROMPTS[0], 8, on_token=lambda r, token: handed.append((r.number, token)), **options)
        for _ in range(5):
            engine.step()
        assert handed and request.text
        handed.clear()
        engine.update(weights(2, 5), restart=True)
        assert request.result() == newer[:5] and request.ended == "stop" and len(request.logprobs) == 5
        assert request.text == Letters().decode(newer[:5])
        for sample in request.samples:
            assert [token for number, token in handed if number == sample.number] == [*newer[:5], None]


OTHERS = {
    "a shape": (
        lambda: Weighted(jnp.zeros(2, jnp.int32), jnp.int32(0)), r"model\.shift is int32\[2\].*, and was int32\[\]",
    ),
    "a dtype": (lambda: Weighted(jnp.int32(0), jnp.float32(0)), r"model\.turn is float32\[\]"),
    "a device": (
        lambda: Weighted(jax.device_put(jnp.int32(0), jax.devices()[1]), jnp.int32(0)), r"model\.shift is .*was .*",
    ),
    "a config": (lambda: Weighted(jnp.int32(0), jnp.int32(0), (7,)), "in another structure or config"),
    "another model": (lambda: [1, 2], r"other numbers, but it has no model\.shift, and has model\[0\]: make another"),
    "fewer leaves": (lambda: Weighted(None, jnp.zeros(2)), r"other numbers, but it has no model\.shift: make another"),
    "more leaves": (
        lambda: Weighted(jnp.int32(0), {"a": jnp.int32(0)}), r"but it has no model\.turn, and has model\.turn\['a'\]:",
    ),
    "donated": (lambda: donated(weights(0)), r"model\.shift was donated to another program: give a living one"),
}  # fmt: skip


def donated(model):
    for leaf in jax.tree.leaves(model):
        leaf.delete()
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused(name, wanted):
    make, says = OTHERS[name]
    with jaxkv.Engine(weights(0), **SIZES) as engine:
        with pytest.raises(ValueError, match=says):
            engine.update(make())
        with pytest.raises(ValueError, match="has no model for draft="):
            engine.update(weights(1), draft=weights(1))
        assert finish(engine, count=8) == wanted[0]


def test_donated_parameters_are_found_before_a_step(wanted, tmp_path):
    model = weights(0)
    with jaxkv.Engine(model, **SIZES) as engine:
        requests = [engine.submit(prompt, 8) for prompt in PROMPTS]
        engine.step()
        engine.step()
        tokens = [list(r.tokens) for r in requests]
        donated(model)
        for call in (engine.step, requests[0].result, lambda: list(engine.run()), engine.warmup):
            with pytest.raises(RuntimeError, match=r"were donated to another program.*engine\.update\(model\)"):
                call()
        with pytest.raises(RuntimeError, match="were donated to another program"):
            engine.save(tmp_path / "engine.safetensors")
        assert [list(r.tokens)[: len(t)] for r, t in zip(requests, tokens, strict=True)] == tokens
        engine.reset()  # needs none
        engine.update(weights(0), restart=True)
        assert [r.result() for r in requests] == wanted[0]
        engine.save(tmp_path / "engine.safetensors")


def test_a_server_waits_for_parameters(wanted, caplog):
    model = weights(0)
    with jaxkv.Engine(model, **SIZES) as engine, engine.serve():
        assert engine.submit(PROMPTS[0], 8).result(60) == wanted[0][0]
        engine.wait(60)
        donated(model)
        request = engine.submit(PROMPTS[0], 8)
        with pytest.raises(TimeoutError):
            request.result(0.2)
        engine.update(weights(2, 5))
        assert request.result(60) == wanted[1][0]
        engine.wait(60)
        engine.release()
        request = engine.submit(PROMPTS[1], 8)
        with pytest.raises(TimeoutError):
            request.result(0.2)
        engine.restore()
        assert request.result(60) == wanted[1][1]
    assert "steps wait for engine.update" in caplog.text


@pytest.mark.parametrize("keep", [*[False] * NIGHTLY, True])
@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["prefix cache"])
def test_memory_is_given_back_and_taken_again(keep, way, wanted, tmp_path):
    gc.collect()
    model = weights(0)
    before = {id(x) for x in jax.live_arrays()}
    options = WAYS[way] | ({"disk": tmp_path} if way == "disk" else {})
    with jaxkv.Engine(model, **SIZES, **options) as engine:
        finish(engine, PROMPTS[2:])
        requests = [engine.submit(prompt, 8) for prompt in PROMPTS]
        for _ in range(4):
            engine.step()
        assert engine.stats()["running"] == 3
        engine.release(keep=keep)
        engine.release()
        assert engine.is_released
        left = [x for x in jax.live_arrays() if id(x) not in before]
        if keep:  # a CPU's host memory is its own: what lies there are few blocks at a time
            left = [x for x in left if x.ndim != 5 or x.shape[0] > 8]
        assert not left, [x.shape for x in left]
        for call in (engine.step, lambda: engine.cache, requests[0].result, engine.warmup):
            with pytest.raises(RuntimeError, match=r"has given its memory back: engine\.restore\(\) takes it again"):
                call()
        late, cancelled = engine.submit(PROMPTS[1], 8), engine.submit(PROMPTS[1], 8)
        cancelled.cancel()
        assert cancelled.ended == "cancelled" and engine.stats()["waiting"] and engine.stats()["blocks_peak"]
        engine.restore()
        computed = engine.tokens
        assert [r.result() for r in [*requests, late]] == [*wanted[0], wanted[0][1]]
        if keep:
            assert engine.tokens - computed < 8 * 4 + len(PROMPTS[1]), "what was kept is not computed again"
        jaxkv.check_invariants(engine.cache)
        engine.release(keep=keep, parameters=True)
        engine.restore()
        with pytest.raises(RuntimeError, match="or released, so it cannot go on"):
            finish(engine)
        engine.release()
        engine.update(weights(2, 5), restart=True)  # while it has no memory
        engine.restore()
        assert finish(engine) == wanted[1]
    with jaxkv.Engine(model, **SIZES, prefix_cache=True) as engine:
        finish(engine)
        with pytest.raises(ValueError, match=r"may use none: make it with spill_bytes="):
            engine.release(keep=True)
        assert not engine.is_released and finish(engine) == wanted[0]


def test_an_interrupt_of_any_line_leaves_an_engine_that_goes_on(wanted):
    turn = 0
    with jaxkv.Engine(weights(0), **SIZES, prefix_cache=True, spill_bytes=10**5) as engine:
        finish(engine)
        for point in itertools.count(1, 1 if NIGHTLY else 47):
            requests = [engine.submit(prompt, 8) for prompt in PROMPTS]
            for _ in range(4):
                engine.step()
            turn = 1 - turn
            try:
                with CutAt(point):
                    engine.update(weights(2, 5) if turn else weights(0), restart=True)
                    engine.release(keep=True)
                    engine.restore()
            except Cut:
                engine.restore()
                jaxkv.check_invariants(engine.cache)
                if point % 2:  # not tried again: either weights, from the first token on
                    assert [r.result() for r in requests] in wanted
                engine.update(weights(2, 5) if turn else weights(0), restart=True)
            else:
                break
            assert [r.result() for r in requests if r.num_restarts] or point % 2
            assert finish(engine) == wanted[turn]
        assert [r.result() for r in requests] == wanted[turn]
    assert point > 300, "lines"


def test_pins_are_not_moved(wanted):
    with jaxkv.Engine(weights(0), **SIZES, prefix_cache=True, spill_bytes=10**5) as engine:
        finish(engine)
        assert engine.prefix.pin(PROMPTS[0])
        with pytest.raises(ValueError, match="Pinned blocks stay on the device"):
            engine.release(keep=True)
        engine.release()
        engine.restore()
        assert finish(engine) == wanted[0]


def test_weights_that_change_in_place_are_seen():
    model = jaxkv.models.small()
    with jaxkv.Engine(model, max_seqs=2, max_seq_len=64) as engine:
        older = engine.submit(list(b"import "), 4).result()
        nnx.update(model, jax.tree.map(lambda x: -x, nnx.state(model)))
        with pytest.warns(UserWarning, match=r"has other parameters now.*engine\.update\(model\)") as warned:
            assert engine.submit(list(b"import "), 4).result() == older
        assert warned[0].filename == __file__
        assert engine.submit(list(b"import "), 4).result() == older  # it is said once
        engine.update(model)
        assert engine.submit(list(b"import "), 4).result() != older


@pytest.mark.skipif(not NIGHTLY, reason="by day on one device")
@skip_by_day("by day other weights come to one device, and rows lie over devices in test_row_shards")
def test_updates_over_rows_of_devices(wanted):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])

    def place(model):
        return jax.device_put(model, jax.sharding.NamedSharding(mesh, jax.P()))

    with jaxkv.Engine(place(weights(0)), **SIZES | {"max_seqs": 4}, prefix_cache=True, spill_bytes=10**5) as engine:
        assert finish(engine) == wanted[0]
        engine.update(place(weights(2, 5)))
        assert finish(engine) == wanted[1]
        requests = [engine.submit(prompt, 8) for prompt in PROMPTS]
        engine.step()
        engine.release(keep=True)
        engine.restore()
        assert [r.result() for r in requests] == wanted[1]
        with pytest.raises(ValueError, match="divided over 1 devices by rows, and the engine's over 2"):
            engine.update(weights(0))


def test_a_draft_model_is_updated_too():
    model = Several(WINDOWS)
    with jaxkv.Engine(model, **SIZES, draft=Several(WINDOWS, wrong=3)) as engine:
        tokens = finish(engine)
        requests = [engine.submit(prompt, 8) for prompt in PROMPTS]
        engine.step()
        engine.release()
        engine.restore()
        assert [r.result() for r in requests] == tokens
        engine.update(model, draft=Several(WINDOWS, wrong=3))
        with pytest.raises(ValueError, match="structure or config"):
            engine.update(model, draft=Several(WINDOWS, wrong=4))
        assert finish(engine) == tokens


def test_an_updated_draft_model_forgets_what_older_weights_computed():
    """Else drafts follow from keys of both, and none is accepted where a prompt comes again, as in rollouts."""
    models = [dataclasses.replace(weights(n), windows=(None,), kind=Several) for n in (0, 3)]
    with jaxkv.Engine(models[0], **SIZES, draft=models[0], draft_tokens=4) as engine:
        tokens, steps = engine.submit(PROMPTS[0], 12).result(), engine.steps
        engine.update(models[1], draft=models[1])
        assert engine.submit(PROMPTS[0], 12).result() != tokens
        assert engine.stats()["acceptance"] == 1 and engine.steps == 2 * steps
