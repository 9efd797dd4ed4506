"""One's own model: mistakes in its form are refused before anything compiles, others found by `check_model`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from documents import ROOT, blocks
from flax import linen, nnx

import jaxkv
import jaxkv.linen
import jaxkv.testing
from jaxkv._engine.programs.model import takes

WIDTH, VOCAB = 8, 12
LAYERS = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=WIDTH),)


def rotate(x, positions):
    half = x.shape[-1] // 2
    angles = jnp.multiply.outer(positions.astype(jnp.float32), 0.7 ** jnp.arange(half, dtype=jnp.float32))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


class Good(nnx.Module):
    """A decoder of one layer or more, which takes what a planted mistake replaces from its own methods."""

    layer_configs, dtype = LAYERS, jnp.float32

    def __init__(self):
        self.embed = nnx.Param(jax.random.normal(jax.random.key(0), (VOCAB, WIDTH)))

    def positions(self, cache, shape):
        return jaxkv.positions(cache, shape)

    def attend(self, x, cache, layer):
        out, cache = jaxkv.attention(*[x[..., None, :]] * 3, cache, layer=layer)
        return out[..., 0, :], cache

    def body(self, tokens, cache):
        x, positions = self.embed[...][tokens], self.positions(cache, tokens.shape)
        for layer in range(len(self.layer_configs)):
            out, cache = self.attend(rotate(x, positions), cache, layer)
            x = x + out
        return x @ self.embed[...].T, cache

    def __call__(self, tokens, *, cache):
        return self.body(tokens, cache)


class WithoutCache(Good):
    def __call__(self, tokens):
        return self.body(tokens, None)


class WithoutPair(Good):
    def __call__(self, tokens, *, cache):
        return self.body(tokens, cache)[0]


class Layerwise(Good):
    def __call__(self, tokens, *, cache):
        logits, cache = self.body(tokens, cache)
        return logits, list(cache.layers)


class PaddedAlone(Good):
    def __call__(self, tokens, *, cache):
        rows, _ = tokens.shape
        return self.body(tokens[:rows], cache)


class GivenBack(Good):
    def __call__(self, tokens, *, cache):
        return self.body(tokens, cache)[0], cache


class OneAxisMore(Good):
    def __call__(self, tokens, *, cache):
        logits, cache = self.body(tokens, cache)
        return logits[None], cache


class AllPlaces(Good):
    def __call__(self, tokens, *, cache, logits_at):
        return self.body(tokens, cache)


class Chosen(Good):
    def __call__(self, tokens, *, cache):
        logits, cache = self.body(tokens, cache)
        return logits.argmax(axis=-1, keepdims=True), cache


class LayerLeftOut(Good):
    layer_configs = LAYERS * 2

    def attend(self, x, cache, layer):
        return super().attend(x, cache, 0)


class Plain:
    layer_configs, dtype = LAYERS, jnp.float32

    def __init__(self):
        self.embed = {...: jnp.ones((VOCAB, WIDTH))}

    positions, attend, body, __call__ = Good.positions, Good.attend, Good.body, Good.__call__


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class WithFunction(Plain):
    activation: object = jnp.tanh


class Undescribed(Good):
    layer_configs = property(lambda self: self.nothing)


class Dropping(Good):
    def __init__(self):
        super().__init__()
        self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(0))

    def __call__(self, tokens, *, cache):
        logits, cache = super().__call__(tokens, cache=cache)
        return self.drop(logits), cache


class Jitted(Dropping):
    """Within, `nnx.jit` writes back all that it was given, changed or not."""

    def __init__(self):
        super().__init__()
        self.norm = nnx.LayerNorm(VOCAB, rngs=nnx.Rngs(0))

    def __call__(self, tokens, *, cache):
        logits, cache = nnx.jit(Good.__call__)(self, tokens, cache=cache)
        return nnx.jit(lambda norm, x: norm(x))(self.norm, logits), cache


MISTAKES = {
    Dropping: r"changes Dropping\.drop\.rngs\.count.*, .*: dropout .* Call model\.eval\(\) first",
    WithoutCache: "the call of WithoutCache takes no cache",
    WithoutPair: r"must return the pair \(logits, cache\), but for packed tokens i32\[5\] it returns float32\[5, 12\]",
    Layerwise: "its second part is a list of 1",
    PaddedAlone: r"fails on packed tokens i32\[5\] \(ValueError: not enough values to unpack",
    GivenBack: "returns the cache that it was given",
    OneAxisMore: r"must return logits \[5, vocabulary\] for packed tokens i32\[5\], not float32\[1, 5, 12\]",
    AllPlaces: r"must return logits \[2, vocabulary\] for logits_at i32\[2\] of packed tokens i32\[5\]",
    Chosen: r"floating point numbers, for packed tokens i32\[5\], not int32\[5, 1\]",
    LayerLeftOut: "writes nothing to layer 1 of its 2",
    Plain: "must be a pytree of arrays, arguments of compiled programs, but Plain is none",
    WithFunction: r"but WithFunction.activation is <",
    Undescribed: "but this Undescribed has no layer_configs",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda cls: cls.__name__)
def test_an_engine_refuses_it_before_anything_compiles(mistake):
    with pytest.raises(ValueError, match=MISTAKES[mistake]) as error:
        jaxkv.Engine(mistake(), max_seqs=2, max_seq_len=64)
    assert str(error.value).endswith("See docs/your_model.md.")


@pytest.mark.parametrize("kind", [Dropping, Jitted])
def test_a_model_in_evaluation_is_taken(kind):
    model = kind()
    model.eval()
    jaxkv.Engine(model, max_seqs=2, max_seq_len=64)


def test_an_engine_inside_jit_is_refused_in_a_sentence():
    for call in (lambda model: jaxkv.Engine(model, max_seqs=2), jaxkv.testing.check_model):
        with pytest.raises(ValueError, match="on the host, so it cannot be part of jit: call it outside"):
            jax.jit(call)(Good())


@pytest.mark.parametrize("what", [3, "model", Good, None])
def test_what_is_no_model_at_all(what):
    with pytest.raises(ValueError, match="model must "):
        jaxkv.generate(what, [[1, 2]], max_new_tokens=1)


class DenseToo(Good):
    """Takes the recipes of docs/your_model.md for calls without a cache, with an adapter that shifts its inputs."""

    def __call__(self, tokens, *, cache, adapters):
        own = adapters[:, None] if cache is None else adapters[jaxkv.plan_step(cache, tokens.shape).token.row]
        return self.body((tokens + own) % VOCAB, cache)

    def positions(self, cache, shape):
        return jnp.arange(shape[1])[None] if cache is None else super().positions(cache, shape)

    def attend(self, x, cache, layer):
        if cache is None:
            return jax.nn.dot_product_attention(*[x[..., None, :]] * 3, is_causal=True)[..., 0, :], None
        return super().attend(x, cache, layer)


def test_recompute_asks_for_dense_attention():
    engine = jaxkv.Engine(DenseToo(), max_seqs=2, max_seq_len=16)
    outputs = [engine.submit([1, 2, 3], 6, adapter=adapter).result() for adapter in (0, 5)]
    assert outputs[0] != outputs[1]
    for adapter, output in zip((0, 5), outputs, strict=True):
        assert engine.recompute([1, 2, 3], output, adapter=adapter) == output
    said = (
        r"The model fails without a cache \(ValueError: cache must be .*\)\. recompute calls it with .* dense attention"
    )
    with pytest.raises(ValueError, match=said):
        jaxkv.Engine(Good(), max_seqs=2, max_seq_len=16).recompute([1, 2, 3], [4])


class LowRank(Good):
    """Takes the recipe of docs/your_model.md for adapters, of which there are three."""

    def __call__(self, tokens, *, cache, adapters):
        down, up = (jax.random.normal(jax.random.key(0), shape) for shape in ((3, VOCAB, 2), (3, 2, VOCAB)))
        x, cache = self.body(tokens, cache)
        own = adapters[:, None] if cache is None else adapters[jaxkv.plan_step(cache, tokens.shape).token.row]
        down, up = (w.at[own].get(mode="fill", fill_value=jnp.nan) for w in (down, up))
        return x + jnp.einsum("...d,...dr,...re->...e", x, down, up), cache


def test_an_adapter_that_there_is_not_ends_its_request_alone():
    engine = jaxkv.Engine(LowRank(), max_seqs=3, max_seq_len=16)
    right = [engine.submit([1, 2, 3], 6, adapter=adapter) for adapter in (1, 2)]
    wrong = engine.submit([1, 2, 3], 6, adapter=3)
    list(engine.run())
    assert wrong.ended == "error" and "NaN" in wrong.error
    assert [len(request.tokens) for request in right] == [6, 6] and right[0].tokens != right[1].tokens


class Enumerated(Good):
    def positions(self, cache, shape):
        return jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape)


class Compiled(Good):
    """Hides in a `jit` of its own what the check of shapes goes by."""

    layer_configs = LAYERS * 2

    @staticmethod
    @functools.partial(jax.jit, static_argnums=2)
    def compiled(x, cache, layer):
        out, cache = jaxkv.attention(*[x[..., None, :]] * 3, cache, layer=layer)
        return out[..., 0, :], cache

    def attend(self, x, cache, layer):
        return self.compiled(x, cache, layer)


class NotHandedOn(Compiled):
    def body(self, tokens, cache):
        x, positions, given = self.embed[...][tokens], self.positions(cache, tokens.shape), cache
        for layer in range(2):
            out, cache = self.attend(rotate(x, positions), given, layer)
            x = x + out
        return x @ self.embed[...].T, cache


class LeftOut(Compiled):
    def attend(self, x, cache, layer):
        return self.compiled(x, cache, 0)


class Extends(Good):
    def body(self, tokens, cache):
        return super().body(tokens, jaxkv.extend(cache, jnp.ones(cache.config.max_seqs, jnp.int32)))


class Neighbours(Good):
    def body(self, tokens, cache):
        logits, cache = super().body(tokens, cache)
        return logits + jnp.roll(logits, 1, axis=0), cache


class OtherPlaces(Good):
    def __call__(self, tokens, *, cache, logits_at):
        logits, cache = self.body(tokens, cache)
        return logits[: logits_at.shape[0]] if tokens.ndim == 1 else logits[:, -1], cache


FOUND = {
    Enumerated: r"token 16 of a row whose tokens come in chunks .* take positions from jaxkv.positions",
    NotHandedOn: "stores nothing in layer 0: call attention with layer=0, and give each layer the cache",
    LeftOut: "stores nothing in layer 1",
    Extends: r"hold \[0, 20, 0\] tokens, but the model returns a cache with \[1, 20, 1\]: do not call jaxkv.extend",
    Neighbours: "packed beside other rows .* let tokens meet in jaxkv.attention alone|come in chunks",
    OtherPlaces: "another order of logits_at",
}


@pytest.mark.parametrize("mistake", FOUND, ids=lambda cls: cls.__name__)
def test_check_model_finds_what_shapes_cannot_tell(mistake):
    with pytest.raises(AssertionError, match=FOUND[mistake]) as error:
        jaxkv.testing.check_model(mistake(), length=20)
    assert str(error.value).endswith("See docs/your_model.md.")


def test_check_model_is_content_with_a_good_one():
    jaxkv.testing.check_model(Good(), length=20)


class Linen(linen.Module):
    """As a codebase has it: positions and a mask are the caller's."""

    @linen.compact
    def __call__(self, tokens, positions, cache=None, attn_mask=None, logits_at=None):
        x = linen.Embed(VOCAB, WIDTH, name="embed")(tokens)
        out, cache = jaxkv.attention(*[rotate(x, positions)[..., None, :]] * 3, cache, layer=0)
        x = x + out[..., 0, :]
        if logits_at is not None:
            x = x[logits_at] if tokens.ndim == 1 else x[jnp.arange(x.shape[0]), logits_at]
        return linen.Dense(VOCAB, name="head")(x), cache


def test_a_linen_module_and_its_variables_are_a_model():
    embed, head = (jax.random.normal(jax.random.key(i), (VOCAB, WIDTH)) for i in (0, 1))
    variables = {"params": {"embed": {"embedding": embed}, "head": {"kernel": head.T, "bias": jnp.zeros(VOCAB)}}}
    model = jaxkv.linen.model(Linen(), variables, layer_configs=LAYERS, dtype="float32", attn_mask=None)
    jaxkv.testing.check_model(model, length=20)
    assert takes(model, "logits_at") and not takes(model, "step")
    assert len(jax.tree.leaves(model)) == 3


class ScannedBlock(linen.Module):
    @linen.compact
    def __call__(self, carry, layer):
        x, cache = carry
        attend = jaxkv.linen.Attention(num_heads=4, num_kv_heads=2, position_fn=jaxkv.models.Rope())
        y, cache = attend(x, cache, layer=layer)
        return (x + y, cache), None


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, tokens, cache=None):
        x = linen.Embed(VOCAB, WIDTH)(tokens)
        blocks = linen.scan(ScannedBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        (x, cache), _ = blocks()((x, cache), jnp.arange(2))
        return linen.Dense(VOCAB)(x), cache


@pytest.mark.parametrize("make", [jaxkv.generate, jaxkv.Engine])
def test_a_linen_module_alone_is_told_what_wraps_it(make):
    given = ([[1, 2]],) if make is jaxkv.generate else ()
    with pytest.raises(ValueError, match=r"this Linen has no layer_configs: wrap .* jaxkv\.linen\.model\. See docs/y"):
        make(Linen(), *given)
    with pytest.raises(ValueError, match=r"this Linen has no layer_configs\.$"):
        jaxkv.CacheConfig.from_model(Linen(), max_seqs=2, max_seq_len=8)


def test_a_linen_module_may_scan_over_its_layers():
    """An engine then makes a cache of stacked layers, with no word of the user's."""
    module, fields = Scanned(), dict(layer_configs=[jaxkv.LayerConfig(num_kv_heads=2, head_dim=WIDTH // 4)] * 2)
    variables = module.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    model = jaxkv.linen.model(module, variables, **fields, dtype="float32", scan=True)
    jaxkv.testing.check_model(model)
    (tokens,) = jaxkv.generate(model, [[1, 2, 3]], 3)
    dense = jax.jit(module.apply)(variables, jnp.array([[1, 2, 3, *tokens[:-1]]]))[0]  # without a cache
    assert tokens == dense[0, 2:].argmax(-1).tolist()
    with pytest.raises(
        ValueError, match=r"make the cache with CacheConfig\(stacked=True\).* jaxkv.linen.model\(..., scan=True\)\)"
    ):
        jaxkv.generate(jaxkv.linen.model(module, variables, **fields, dtype="float32"), [[1, 2, 3]], 3)
    with pytest.raises(ValueError, match="scan must be True or False"):
        jaxkv.linen.model(module, variables, **fields, scan="layers")


def test_a_linen_module_without_a_cache_is_refused():
    with pytest.raises(ValueError, match="Dense's call must take cache"):
        jaxkv.linen.model(linen.Dense(3), {}, layer_configs=LAYERS)


def test_attention_without_extend_raises():
    """Outside jit, where it is known that no row has a token in this step."""
    cache = jaxkv.init(jaxkv.CacheConfig(layers=LAYERS, max_seqs=2, max_seq_len=64, num_blocks=8, dtype="float32"))
    x = jnp.ones((2, 1, 1, WIDTH))
    for call in (
        lambda c: jaxkv.attention(x, x, x, c, layer=0), lambda c: jaxkv.attention(x, x, x, c.layers[0]),
        lambda c: jaxkv.dot_product_attention(x, x, x, cache=c, layer=0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"call cache = jaxkv.extend\(cache, num_tokens\) once before"):
            call(cache)
        call(jaxkv.extend(cache, [1, 0]))
        call(jaxkv.extend(cache, [65, 0]))  # a row that failed is no mistake of this kind
    jax.jit(functools.partial(jaxkv.attention, layer=0))(x, x, x, cache)


def test_the_scheduler_of_the_page_serves_what_generate_does(monkeypatch):
    """Though blocks run out, so that a row gives way and is computed again."""
    (block,) = [x for x in blocks((ROOT / "docs/your_model.md").read_text(), "python") if "def serve(" in x]
    failed, extend = [], jaxkv.extend

    def watch(cache, counts):
        cache = extend(cache, counts)
        failed.append(bool(cache.failed.any()))
        return cache

    monkeypatch.setattr(jaxkv, "extend", watch)
    exec(compile(block, "page", "exec"), dict(model=Good(), functools=functools, jax=jax, jnp=jnp, jaxkv=jaxkv))
    assert any(failed) and not all(failed)
