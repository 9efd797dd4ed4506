"""Layers that keep a state, on arrays: XLA against the reference; slots, snapshots, gradients, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels.xla.recurrence import prefill, steps
from pallas_kernels.xla.recurrence.formulas import invert

LENGTHS, NEW, SLOTS = (70, 3, 0, 40), (70, 1, 0, 33), (2, 5, 0, 1)
SNAPSHOTS = ((6, 7, 8, 9), (-1,) * 4, (-1,) * 4, (10, -1, 11, -1))
TOKENS = 75


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A mixer: its door, its arrays by the axes of their tokens, and those that no token has."""

    door: object
    tokens: dict
    fixed: dict
    options: dict = dataclasses.field(default_factory=dict)

    def arrays(self, axes, seed=0):
        """Returns the mixer's arrays, random, by name."""
        random = np.random.default_rng(seed)

        def draw(shape):
            return jnp.asarray(random.standard_normal(shape), jnp.float32)

        return {n: f(draw((*axes, *s))) for n, (s, f) in self.tokens.items()} | {
            n: f(draw(s)) for n, (s, f) in self.fixed.items()
        }


def same(x):
    return x


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def gate(x):
    return -3 * jax.nn.softplus(x)


KEYS = {"q": ((2, 8), same), "k": ((2, 8), unit), "v": ((4, 6), same)}
RATE = {"beta": ((4,), lambda x: 2 * jax.nn.sigmoid(x))}
MIXERS = {
    "delta": Mixer(
        pallas_kernels.gated_delta_rule, KEYS | {"g": ((4,), gate)} | RATE, {"states": ((12, 4, 8, 6), same)}
    ),
    "channels": Mixer(
        pallas_kernels.gated_delta_rule, KEYS | {"g": ((4, 8), gate)} | RATE, {"states": ((12, 4, 8, 6), same)},
        {"scale": 0.3},
    ),
    "space": Mixer(
        pallas_kernels.state_space,
        {"x": ((4, 6), same), "dt": ((4,), jax.nn.softplus), "B": ((2, 8), same), "C": ((2, 8), same)},
        {"A": ((4,), lambda x: -jnp.exp(x)), "D": ((4,), same), "states": ((12, 4, 6, 8), same)},
    ),
    "conv": Mixer(
        pallas_kernels.causal_conv, {"x": ((6,), same)},
        {"weight": ((6, 4), same), "bias": ((6,), same), "states": ((12, 6, 3), same)}, {"activation": "silu"},
    ),
    "groups": Mixer(
        pallas_kernels.causal_conv, {"x": ((6,), same)}, {"weight": ((6, 3), same), "states": ((12, 2, 2, 3), same)},
    ),
}  # fmt: skip
LAYOUTS = {"padded": (4, TOKENS), "packed": (sum(NEW) + 5,)}


def batch(lengths=LENGTHS, new=NEW, slots=SLOTS, **rest):
    """Returns the rows of a step as the doors take them."""
    rows = {"lengths": lengths, "new": new, "slots": slots} | rest
    return {name: x if name == "every" else jnp.asarray(x, jnp.int32) for name, x in rows.items()}


def run(mixer, arrays, rows, implementation=None):
    """Returns the output and the states of a mixer."""
    return mixer.door(**arrays, **rows, **mixer.options, implementation=implementation)


def assert_alike(found, wanted, tolerance=2e-5):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("layout", "every"), [("padded", None), ("padded", 48), ("packed", 16)])
@pytest.mark.parametrize("name", MIXERS)
def test_chunks_are_as_token_by_token(name, layout, every):
    mixer, axes = MIXERS[name], LAYOUTS[layout]
    arrays = mixer.arrays(axes)
    # Row 0 begins, row 2 has no token: whatever their slots and the padding hold is never seen.
    arrays["states"] = arrays["states"].at[jnp.array([0, 2])].set(jnp.nan)
    padding = np.ones(axes, bool)
    for row, (start, count) in enumerate(zip(np.cumsum(NEW) - NEW, NEW, strict=True)):
        padding[(row, slice(0, count)) if len(axes) == 2 else slice(start, start + count)] = False
    for key in mixer.tokens:
        arrays[key] = jnp.where(padding.reshape(*axes, *[1] * (arrays[key].ndim - len(axes))), jnp.nan, arrays[key])
    rows = batch() if every is None else batch(every=every, snapshot_slots=SNAPSHOTS)
    found, wanted = (run(mixer, arrays, rows, name) for name in ("xla", "reference"))
    assert_alike(found, wanted)
    assert not found[0][padding].any()
    untouched = [0, 3, 4] + ([6, 7, 8, 9, 10, 11] if every is None else [] if every == 16 else [7, 8, 9, 11])
    np.testing.assert_array_equal(found[1][np.array(untouched)], arrays["states"][np.array(untouched)])
    assert bool(jnp.isfinite(found[1][2]).all())


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize(("name", "size"), [("delta", 64), ("channels", 32), ("space", 64)])
def test_chunks_of_a_gpu(monkeypatch, name, size):
    """They are longer, since each is launched."""
    sizes, plan_chunks = [], prefill._plan_chunks
    monkeypatch.setattr(steps, "is_for_gpu", lambda: True)
    monkeypatch.setattr(prefill, "_plan_chunks", lambda *args: sizes.append(args[2]) or plan_chunks(*args))
    test_chunks_are_as_token_by_token(name, "padded", None)
    assert sizes == [size]


@pytest.mark.parametrize("name", MIXERS)
def test_a_prompt_in_pieces_is_as_one_step(name):
    mixer = MIXERS[name]
    arrays = mixer.arrays((1, 70))
    whole, states = run(mixer, arrays, batch((70,), (70,), (3,)))
    # The second piece comes in its state's new slot, the third token by token, packed.
    held, out, begin = arrays["states"], [], 0
    for count, slot, to in ((37, 3, 3), (32, 3, 4), (1, 4, 4)):
        piece = {n: arrays[n][:, begin : begin + count] for n in mixer.tokens} if count > 1 else {
            n: arrays[n][0, begin : begin + count] for n in mixer.tokens
        }  # fmt: skip
        begin += count
        y, held = run(mixer, arrays | piece | {"states": held}, batch((begin,), (count,), (slot,), to_slots=(to,)))
        out.append(y.reshape(count, *y.shape[-(y.ndim - (2 if count > 1 else 1)) :]))
    assert_alike((jnp.concatenate(out), held[4]), (whole[0], states[3]))


@pytest.mark.parametrize("layout", [*["padded"] * NIGHTLY, "packed"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_token_of_each_row_is_one_pass(name, layout):
    mixer, axes = MIXERS[name], (4, 1) if layout == "padded" else (4,)
    arrays = mixer.arrays(axes)
    new = (1, 1, 0, 1) if layout == "padded" else (1, 1, 1, 1)
    rows = batch((32, 3, 5, 1), new, to_slots=(9, 5, 0, 1), every=16, snapshot_slots=((7,), (-1,), (8,), (-1,)))
    found, wanted = (run(mixer, arrays, rows, name) for name in ("xla", "reference"))
    assert_alike(found, wanted)
    np.testing.assert_array_equal(found[1][7], found[1][9])
    np.testing.assert_array_equal(found[1][2], arrays["states"][2])


@pytest.mark.parametrize("name", MIXERS)
def test_a_row_with_nan_does_not_touch_others(name):
    mixer = MIXERS[name]
    for axes in LAYOUTS.values():
        arrays = mixer.arrays(axes)
        first = next(iter(mixer.tokens))
        at = (0, 5) if len(axes) == 2 else 5
        bad = arrays | {first: arrays[first].at[at].set(jnp.nan)}
        (y, states), (well, whole) = (run(mixer, x, batch()) for x in (bad, arrays))
        own = np.zeros(axes, bool)
        own[(0,) if len(axes) == 2 else slice(0, 70)] = True
        np.testing.assert_array_equal(y[~own], well[~own])
        np.testing.assert_array_equal(np.delete(states, 2, 0), np.delete(whole, 2, 0))
        assert bool(jnp.isnan(y).any())


@pytest.mark.parametrize(
    ("name", "layout"), [("delta", "packed"), ("channels", "padded"), ("space", "padded"), ("conv", "packed")]
)
def test_gradients_are_the_reference_s(name, layout):
    mixer = MIXERS[name]
    arrays = mixer.arrays(LAYOUTS[layout])

    @functools.partial(jax.jit, static_argnums=1)
    def loss(arrays, implementation):
        y, states = run(mixer, arrays, batch(), implementation)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(states))

    found, wanted = (jax.grad(loss)(arrays, name) for name in ("xla", "reference"))
    for key in arrays:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-3, atol=2e-4, err_msg=key)


@pytest.mark.parametrize("layout", [*["padded"] * NIGHTLY, "packed", "decode"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_donated_pool_is_updated_in_place(name, layout):
    mixer = MIXERS[name]
    axes, new = ((4, 1), (1, 1, 1, 1)) if layout == "decode" else (LAYOUTS[layout], NEW)
    arrays = mixer.arrays(axes)
    pool = jax.ShapeDtypeStruct((4000, *arrays["states"].shape[1:]), jnp.float32)
    rows = batch(new=new, slots=(2, 5, 3, 1))
    step = jax.jit(lambda states, arrays: run(mixer, arrays | {"states": states}, rows), donate_argnums=0)
    memory = step.lower(pool, arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < np.prod(pool.shape) * 4 / 2


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_cpu_multiplies_states_by_one_vector_after_another(platform):
    """By two rows at a time XLA packs each state first, which takes longer than the products."""
    mixer = MIXERS["delta"]
    arrays, rows = mixer.arrays((4, 1)), batch(new=(1, 1, 1, 1), slots=(2, 5, 3, 1))
    lowered = jax.jit(lambda arrays: run(mixer, arrays, rows)).trace(arrays).lower(lowering_platforms=(platform,))
    products = [line.split("->")[-1] for line in lowered.as_text().splitlines() if "stablehlo.dot_general" in line]
    wanted = ["tensor<1x4x6xf32>"] * 2 if platform == "cpu" else ["tensor<4x4x2x6xf32>"]
    assert [line.split("loc")[0].strip() for line in products] == wanted


def test_inverses_hold_where_keys_repeat():
    lower = jnp.tril(jnp.full((2, 64, 64), 1.9, jnp.float32), -1)
    product = jax.jit(invert)(lower) @ (lower + jnp.eye(64, dtype=jnp.float32)[None])
    np.testing.assert_allclose(product, np.broadcast_to(np.eye(64), (2, 64, 64)), atol=1e-4)


def test_explain_says_who_runs():
    arrays = MIXERS["delta"].arrays((4, 1))
    assert pallas_kernels.explain("gated_delta_rule", **arrays, platform="tpu").implementation == "xla"
    assert pallas_kernels.explain("causal_conv", implementation="reference").implementation == "reference"
    with pytest.raises(NotImplementedError, match="gpu backend has no kernel of its own for causal_conv"):
        pallas_kernels.explain("causal_conv", implementation="gpu")
    with pytest.raises(TypeError, match="causal_conv takes no q"):
        pallas_kernels.explain("causal_conv", q=None)


BAD = {
    "x must be padded": ("conv", {"x": jnp.ones(3)}),
    "weight must be": ("conv", {"weight": jnp.ones((5, 4))}),
    "states must be": ("conv", {"states": jnp.ones((12, 6, 4))}),
    r"weight must be \[C, width\], not empty": ("conv", {"weight": jnp.ones((6, 0))}),
    r"states must be \[slots, 6, 3\] or \[slots, groups, 3, channels\]": ("conv", {"states": jnp.ones((12, 2, 2, 3))}),
    "states must hold 6 channels in equal groups": ("conv", {"states": jnp.ones((12, 2, 3, 4))}),
    "bias must be": ("conv", {"bias": jnp.ones(4)}),
    "activation must be": ("conv", {"activation": "relu"}),
    "x must be an array": ("conv", {"x": [1.0]}),
    "weight must be floating point": ("conv", {"weight": jnp.ones((6, 4), jnp.int32)}),
    "slots must be i32": ("conv", {"slots": 3}),
    "lengths must be i32": ("conv", {"lengths": jnp.ones(3, jnp.int32)}),
    "new must be i32": ("conv", {"new": jnp.ones(4)}),
    "give both, or none": ("conv", {"every": 16}),
    "every must be": ("conv", {"every": 0, "snapshot_slots": jnp.zeros((4, 1), jnp.int32)}),
    "snapshot_slots must be": ("conv", {"every": 16, "snapshot_slots": jnp.zeros(4, jnp.int32)}),
    "implementation must be": ("conv", {"implementation": "cuda"}),
    "Padded tokens have 3 rows": ("conv", {"x": jnp.ones((3, 2, 6))}),
    r"k must be \[4, 75, h, K\]": ("delta", {"k": jnp.ones((4, TOKENS, 3))}),
    r"q must be \[4, 75, 2, 8\]": ("delta", {"q": jnp.ones((4, TOKENS, 1, 8))}),
    r"g must be \[4, 75, 4\] or \[4, 75, 4, 8\]": ("delta", {"g": jnp.ones((4, TOKENS, 3))}),
    "beta must be": ("delta", {"beta": jnp.ones((4, TOKENS))}),
    "cannot share 3 heads": ("delta", {"q": jnp.ones((4, TOKENS, 3, 8)), "k": jnp.ones((4, TOKENS, 3, 8))}),
    "scale must be": ("delta", {"scale": float("nan")}),
    "4 heads of x cannot share 3 heads of B": ("space", {x: jnp.ones((4, TOKENS, 3, 8)) for x in "BC"}),
    "dt must be": ("space", {"dt": jnp.ones((4, TOKENS))}),
    "D must be": ("space", {"D": jnp.ones(6)}),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    name, changes = BAD[message]
    mixer = MIXERS[name]
    arguments = mixer.arrays((4, TOKENS)) | batch() | mixer.options | changes
    with pytest.raises(ValueError, match=message):
        mixer.door(**arguments)
