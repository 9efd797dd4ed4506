"""Who sees whom beyond causality: slopes, spans, trees, chunks and whole memories, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_tiles
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import gpu, reference, testing, tpu
from pallas_kernels.api import reference_backend
from pallas_kernels.common.batch import MaskSpec, PagedBatch
from pallas_kernels.testing import Case
from pallas_kernels.xla import tile_sizes, work_list as work

SIZES = dict(num_heads=10, num_kv_heads=2, head_dim=12, block_size=5)  # groups of 5
CASES = {
    "padded": Case(lengths=(44, 0, 21, 6), new=(9, 0, 1, 6), padding=2, **SIZES),
    "packed": Case(lengths=(44, 0, 21, 70), new=(9, 0, 1, 40), padding=3, packed=True, **SIZES),
}
# The layout, and what is asked for: S, T and A stand for spans, a tree and slopes.
VARIANTS = [
    ("padded", {"tree": "T", "window": 6, "alibi": "A"}),
    ("packed", {"tree": "T", "chunk": 16}),
    ("padded", {"spans": "S", "chunk": 7, "alibi": "A"}),
    ("packed", {"spans": "S", "window": 5}),
    ("packed", {"causal": False, "blocks": "B"}),
    ("padded", {"blocks": "B", "window": 30}),
    ("padded", {"window": 6, "sink_tokens": 4, "alibi": "A"}),
    ("packed", {"window": 7, "sink_tokens": 6, "tree": "T"}),  # over a block
] + NIGHTLY * [("packed", {"window": 1, "sink_tokens": 5})]  # up to a block
BY_DAY = [VARIANTS[i] for i in (0, 3, 4, 7)]


def options_of(case, variant):
    rng, axes = np.random.default_rng(1), testing.make_inputs(case).q.shape[:-2]
    arrays = {
        "S": rng.integers(0, 3, axes).astype(np.int32),
        # Some parents are no earlier tokens: those count as the context.
        "T": np.where(rng.random(axes) < 0.8, np.arange(axes[-1]) - rng.integers(1, 4, axes), 99).astype(np.int32),
        # What does not increase counts as nothing, and neither does what there is not.
        "B": np.array([[0, 3, 3, 8, -1], [0, -1, -1, -1, -1], [1, 4, 2, 99, 100], [-1, 0, 1, 5, 13]], np.int32),
        "A": rng.random(case.num_heads).astype(np.float32),
    }
    return {name: jnp.asarray(arrays[x]) if isinstance(x, str) else x for name, x in variant.items()}


@pytest.mark.parametrize(("layout", "variant"), VARIANTS if NIGHTLY else BY_DAY, ids=str)
def test_against_the_reference(layout, variant):
    """With NaN in everything that must not be read, in tiles and at once; those with slopes with their gradients."""
    case = CASES[layout]
    inputs, options = testing.make_inputs(case), options_of(case, variant)
    if layout == "packed" and "tree" in variant:  # packed parents count from the row's first token
        start = np.cumsum(case.new) - np.array(case.new)
        row = np.repeat(np.arange(len(case.new)), case.new)
        parents = np.asarray(options["tree"]).copy()
        parents[: len(row)] -= start[row].astype(np.int32)
        options["tree"] = jnp.asarray(parents)
    weights = [jnp.asarray(np.random.default_rng(i).normal(size=n), jnp.float32) for i, n in ((2, 12), (3, 10))]
    static = {name: x for name, x in options.items() if not isinstance(x, jax.Array)}
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}

    def run(attend, inputs, q, kv, arrays):
        out, lse = attend(q, kv, *inputs[2:], return_lse=True, **static, **arrays)
        seen = jnp.isfinite(lse)
        loss = (out * weights[0][None].reshape(*[1] * (out.ndim - 1), -1)).sum()
        return loss + (jnp.where(seen, lse, 0) * weights[1].reshape(*[1] * (lse.ndim - 1), -1)).sum(), (out, lse)

    def both(attend, inputs):
        floats = {name: x for name, x in arrays.items() if name == "alibi"}
        others = {name: x for name, x in arrays.items() if name != "alibi"}
        loss = lambda q, kv, floats: run(attend, inputs, q, kv, floats | others)  # noqa: E731
        if "alibi" in options:
            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(inputs.q, inputs.kv, floats)
        return jax.jit(loss)(inputs.q, inputs.kv, floats)[1]

    ours = functools.partial(pallas_kernels.paged_attention, implementation="xla")
    theirs = both(reference.paged_attention, inputs)
    at_once = jax.jit(functools.partial(run, ours, inputs))(inputs.q, inputs.kv, arrays)[1]
    found = jax.tree.leaves((both(ours, in_tiles(inputs)), at_once))
    expected = theirs[0][1] if "alibi" in options else theirs
    for a, b in zip(found, jax.tree.leaves((theirs, expected)), strict=True):
        assert not np.isnan(a).any()
        scale = max(1.0, float(np.max(np.abs(b), initial=0, where=np.isfinite(b))))
        testing.assert_close(a / scale, b / scale)


@pytest.mark.parametrize(("window", "length", "tiles"), [(10, 961, 3), (990, 999, 16)])
def test_what_lies_between_first_tokens_and_window_is_not_read(window, length, tiles):
    """Of a row of 16 tiles of 64 tokens only the first is, and those of the window, each once."""
    case = Case(lengths=(length,), new=(1,), num_heads=2, num_kv_heads=1, head_dim=4, block_size=16)
    inputs = testing.make_inputs(case)
    batch = PagedBatch(*inputs[2:])
    rows = work.find_rows((1, 1), batch)
    tile_mask = work.find_tile_mask((1, 1), rows, batch, MaskSpec(window=window, sink_tokens=5))
    tiling = tile_sizes.choose_tiling(inputs.q.reshape(1, 2, 4), inputs.kv, inputs.tables, 1, 1)
    assert int(work.plan(tiling, 1, rows, tile_mask).num_items) == tiles
    between = inputs.tables[0, 1 : max((length - window) // 16, 1)]
    poisoned = inputs.kv.at[between].set(jnp.nan)
    out = pallas_kernels.paged_attention(inputs.q, poisoned, *inputs[2:], window=window, sink_tokens=5)
    expected = reference.paged_attention(inputs.q, inputs.kv, *inputs[2:], window=window, sink_tokens=5)
    testing.assert_close(out, expected)


def arguments():
    case = CASES["padded"]
    return testing.make_inputs(case), {name: jnp.zeros((4, 11), jnp.int32) for name in ("spans", "tree")}


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        (platform, name)
        for platform, backend in (("tpu", tpu), ("cuda", gpu))
        for name in sorted(set(reference_backend.OPTIONS) - set(backend.OPTIONS))
    ],
)
def test_kernels_refuse_by_name(platform, name):
    inputs, tokens = arguments()
    value = tokens | {
        "alibi": jnp.ones(10),
        "causal": False,
        "blocks": jnp.zeros((4, 2), jnp.int32),
        "tokens": jnp.zeros((4, 11, 3), jnp.int32),
        "deterministic": True,
        "compress_ratio": 4,
    }
    asked = {name: value[name]}
    given = {"q": inputs.q, "kv": inputs.kv, "tables": inputs.tables} | asked
    choice = pallas_kernels.explain(platform=platform, **given)
    assert choice.implementation == "xla" and f"take no {name} yet" in choice.reason
    with pytest.raises(NotImplementedError, match=f"take no {name} yet; leave implementation=None"):
        pallas_kernels.paged_attention(*inputs, implementation={"cuda": "gpu"}.get(platform, platform), **asked)


@pytest.mark.parametrize(("platform", "name"), [("tpu", "tpu"), ("cuda", "gpu")])
def test_kernels_take_first_tokens_beside_a_window(platform, name):
    shape = jax.ShapeDtypeStruct
    given = dict(kv=shape((9, 2, 2, 16, 128), jnp.bfloat16), tables=shape((2, 4), jnp.int32), window=8, sink_tokens=4)
    for tokens, more in ((1, {}), (40, {"tree": shape((2, 40), jnp.int32)})):
        q = shape((2, tokens, 10, 128), jnp.bfloat16)
        assert pallas_kernels.explain(q=q, platform=platform, **given, **more).implementation == name


WRONG = {
    "alibi": (
        lambda t: {"alibi": jnp.ones(3)},
        r"alibi must be f32\[10\], one slope for each query head, not float32\[3\]",
    ),
    "spans": (
        lambda t: {"spans": t["spans"][:2]},
        r"spans must be i32\[4, 11\], one number for each token, not int32\[2, 11\]",
    ),
    "tree and spans": (lambda t: t, "cannot be combined with spans"),
    "tree and mask": (
        lambda t: {"tree": t["tree"], "mask": jnp.ones((4, 11, 9), bool)},
        "cannot be combined with mask",
    ),
    "chunk and window": (lambda t: {"chunk": 4, "window": 4}, "chunk=4 and window=4 cannot both limit"),
    "chunk": (lambda t: {"chunk": 0}, "chunk must be an integer from 1 .* not 0: None means no"),
    "blocks": (lambda t: {"blocks": t["tree"][:2]}, r"blocks must be i32\[4, n\], .* not int32\[2, 11\]"),
    "sink_tokens": (lambda t: {"sink_tokens": 4}, "sink_tokens are seen beside a window, and there is none"),
    "no sink_tokens": (lambda t: {"sink_tokens": 0, "window": 4}, "sink_tokens must be an integer from 1 to .* not 0"),
    "half a sink": (lambda t: {"sink_tokens": 0.5, "window": 4}, "sink_tokens must be an integer from 1 to .* not 0.5"),
    "causal": (lambda t: {"causal": 0}, "causal must be True or False, not 0"),
    "window of a memory": (lambda t: {"causal": False, "window": 3}, "no position to measure window from"),
    "tree of a memory": (lambda t: {"causal": False, "tree": t["tree"]}, "no position to measure tree from"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_sentence(name):
    inputs, tokens = arguments()
    change, sentence = WRONG[name]
    with pytest.raises(ValueError, match=sentence):
        pallas_kernels.paged_attention(*inputs, **change(tokens))


def test_what_nobody_takes():
    inputs, _ = arguments()
    given = {"q": inputs.q, "kv": inputs.kv, "tables": inputs.tables}
    with pytest.raises(TypeError, match="takes no bias: a slope by distance is alibi="):
        pallas_kernels.explain(**given, bias=1)
    with pytest.raises(TypeError, match="takes no colour: it takes alibi, blocks"):
        pallas_kernels.explain(**given, colour="red")
