"""States by the TPU kernels, interpreted, a token of each row: against the reference, with NaN in all that must not be
read. And what is said of the choice of these kernels."""

import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY
from state_kernels import CASES, CONVOLUTION, DELTA, SPACE, Mixing, check, expect, make_arrays
from tpu_state_cases import CHANNEL_CHUNKS, TWO_HEADS, bind, run

import pallas_kernels
from pallas_kernels.tpu import mixers
from pallas_kernels.tpu.recurrence import state_decode

pytestmark = pytest.mark.timeout(240, method="thread")


@pytest.fixture
def small_items(monkeypatch):
    """Two items a row, or of a convolution two on their way, and two rows a grid step."""
    monkeypatch.setattr(state_decode, "ITEM_BYTES", TWO_HEADS)
    monkeypatch.setattr(mixers, "WINDOWS", 2)
    monkeypatch.setattr(state_decode, "rows_of_block", lambda *_: 2)


@pytest.mark.parametrize("mode", interpreter.MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_token_of_each_row(name, mode, small_items):
    by_day = ("delta", "races"), ("channels", "plain"), ("space", "races"), ("convolution", "races")
    if not NIGHTLY and (name, mode) not in by_day:
        pytest.skip("by day each mixer runs in one mode")
    run(CASES[name], interpreter.MODES[mode])


BFLOAT16 = CONVOLUTION._replace(dtypes=("bfloat16", "bfloat16"))


@pytest.mark.parametrize(
    "case",
    [BFLOAT16, *[CONVOLUTION._replace(dtypes=("float32", "bfloat16"), new=(0, 1, 0, 1, 1)), BFLOAT16._replace(
        before=(5,), new=(1,), slots=(10,), to_slots=(0,), snapshots=(-1,), heads=12)] * NIGHTLY],
)  # fmt: skip
def test_inputs_of_other_dtypes_and_sizes(case):
    run(case, RACES)


def test_a_step_without_a_token():
    case = SPACE._replace(new=(0,) * 5, to_slots=(-1,) * 5, heads=2)
    run(case, RACES)


@pytest.mark.parametrize(("heads", "keys"), [(3, 3), *[(6, 2), (4, 2)] * NIGHTLY])
def test_a_row_of_one_item(heads, keys):
    """A last head alone, two heads side by side of two keys, or of one."""
    run(DELTA._replace(heads=heads, keys=keys), RACES)


@pytest.mark.skipif(not NIGHTLY, reason="six programs to interpret")
@pytest.mark.parametrize("fields", [{}, {"new": (1, 3), "packed": True, "every": 64}])
def test_batches_and_scans(fields):
    """Under `vmap` each pool is its own; a scan carries a pool from layer to layer."""
    case = Mixing(before=(2, 0), new=(1, 1), slots=(5, 2), to_slots=(5, 2), snapshots=(-1, 8), heads=2)
    case = case._replace(**fields)
    step, arrays = bind(case), [make_arrays(case), make_arrays(case, 1)]
    layers = jax.tree.map(lambda *x: jnp.stack(x), *arrays)

    def batched(layers, interpret):
        return jax.vmap(functools.partial(step, interpret=interpret))(layers)

    found = interpreter.run(batched, layers, mode=PLAIN)
    for i, each in enumerate(arrays):
        check(jax.tree.map(lambda x, i=i: x[i], found), case, each)

    def scanned(layers, interpret):
        def layer(states, x):
            y, states = step(x | {"states": states}, interpret)
            return states, y

        states, ys = jax.lax.scan(layer, layers["states"][0], layers)
        return ys[1], states

    after = expect(case, arrays[0])[1]
    check(interpreter.run(scanned, layers, mode=PLAIN), case, arrays[1] | {"states": jnp.asarray(after)})


@pytest.mark.parametrize(
    "case",
    [
        DELTA,
        *[CONVOLUTION, DELTA._replace(new=(1, 3, 0, 1, 70), every=64), CHANNEL_CHUNKS._replace(packed=False)] * NIGHTLY,
    ],
)
def test_heads_over_devices(case):
    mesh, arrays = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)), make_arrays(case)
    heads, whole = jax.P(None, None, "x"), jax.P()
    fixed = {"scale": whole, "weight": jax.P("x"), "bias": jax.P("x"), "states": jax.P(None, "x")}
    specs = dict.fromkeys(arrays, heads) | {name: spec for name, spec in fixed.items() if name in arrays}

    def divided(arrays, interpret):
        step = functools.partial(bind(case), interpret=interpret)
        out_specs = heads, specs["states"]
        return jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)(arrays)

    check(interpreter.run(divided, arrays, mode=PLAIN), case)


def shape(*axes, dtype="float32"):
    return jax.ShapeDtypeStruct(axes, dtype)


def explain(axes=(4, 1), widths=(128, 128), states="float32", values="bfloat16", **others):
    """Returns what is said of the gated delta rule on a TPU."""
    heads, (keys, width) = 4, widths
    q = shape(*axes, heads, keys)
    arrays = dict(q=q, k=q, v=shape(*axes, heads, width, dtype=values), g=shape(*axes, heads))
    arrays |= dict(beta=arrays["g"], states=shape(9, heads, keys, width, dtype=states))
    return pallas_kernels.explain("gated_delta_rule", **arrays | others, platform="tpu")


def test_the_choice_is_explained():
    assert explain().implementation == "tpu"
    refused = {
        "keep states in float32, not bfloat16": explain(states="bfloat16"),
        "v is float16: cast it": explain(values="float16"),
        "128 x 192 fill no whole register tiles of 8 x 128": explain(widths=(128, 192)),
        "12 x 128 fill no whole": explain(widths=(12, 128)),
    }
    for sentence, choice in refused.items():
        assert choice.implementation == "xla" and sentence in choice.reason, choice
    assert explain((4, 70)).implementation == explain((70,)).implementation == "tpu"
    assert explain((70,), g=shape(70, 4, 128)).implementation == "tpu"
    for width in (64, 256):
        other = explain((70,), widths=(width, 128), g=shape(70, 4, width))
        assert other.implementation == "xla" and f"128 keys a head, not {width}" in other.reason, other
    x, gates = shape(70, 512, 128), shape(70, 512)
    many = dict(q=x, k=x, v=x, g=gates, beta=gates, states=shape(9, 512, 128, 128))
    many = pallas_kernels.explain("gated_delta_rule", **many, platform="tpu")
    assert many.implementation == "xla" and "512 states of a row take 5" in many.reason, many
    every = explain((70,), every=48, snapshot_slots=shape(4, 2, dtype="int32"))
    assert every.implementation == "xla" and "not after every 48" in every.reason


def explain_convolution(inner=(8, 3, 128), axes=(4, 1), states="bfloat16", **others):
    """Returns what is said of a convolution on a TPU."""
    channels, taps = (inner[0] * inner[2], inner[1]) if len(inner) == 3 else inner
    arrays = dict(x=shape(*axes, channels), weight=shape(channels, taps + 1), states=shape(9, *inner, dtype=states))
    return pallas_kernels.explain("causal_conv", **arrays | others, platform="tpu")


def test_the_choice_for_a_convolution_is_explained():
    assert pallas_kernels.explain("causal_conv", platform="tpu").implementation == "tpu"
    assert explain_convolution().implementation == explain_convolution((24, 3, 128)).implementation == "tpu"
    refused = {
        "states is float16: cast it": explain_convolution(states="float16"),
        "[1024, 3] are no whole register tiles of 8 x 128": explain_convolution((1024, 3)),
        "[26, 3, 128] are no whole": explain_convolution((26, 3, 128)),
        "[16, 3, 64] are no whole": explain_convolution((16, 3, 64)),
        "tiles of 2 inputs of 128 channels": explain_convolution((8, 2, 128)),
        "take more than the 1 MiB": explain_convolution((2048, 3, 128)),
        "more than a token of each row": explain_convolution(axes=(4, 2)),
        "more than a token of each": explain_convolution(axes=(4,)),
    }
    for sentence, choice in refused.items():
        assert choice.implementation == "xla" and sentence in choice.reason, choice
