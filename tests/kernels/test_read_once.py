"""Rows that share blocks read them once on top of any backend: here the reference, which is quick to compile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharing
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import reference, testing, xla
from pallas_kernels.api import cascade, reference_backend
from pallas_kernels.common import shared_prefix as prefixes
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.testing import Case

# Groups of five rows, two and one, and who is in none; of some rows all is shared but the last token, of one nothing
# is; an empty row, and one that is not in the step.
LENGTHS, NEW = (13, 73, 33, 20, 40, 17, 0, 44, 5, 90), (1, 1, 1, 1, 1, 1, 0, 0, 1, 1)
MANY = (1, 3, 2, 5, 1, 1, 0, 0, 4, 30)
GROUPS = {(0, 2, 3, 4, 5): 3, (1, 9): 17, (8,): 1}
WHOLE = tuple(length + new - 1 for length, new in zip(LENGTHS, MANY, strict=True))
CASES = {
    "mixed, packed": (Case(WHOLE, MANY, 7, 1, 8, 4, packed=True, padding=3), GROUPS, None),
}
if NIGHTLY:
    CASES |= {
        "decode, sinks": (Case(LENGTHS, NEW, 10, 2, 80, 4, sinks=True, soft_cap=3.0), GROUPS, None),
        "64 rows, blocks of 1": (Case((9,) * 64 + (7,), (1,) * 65, 2, 2, 8, 1), {tuple(range(64)): 8}, None),
        "mixed, padded": (Case(WHOLE, MANY, 4, 2, 8, 4, padding=1), GROUPS, None),
        "tree": (Case(WHOLE, MANY, 4, 2, 8, 4, packed=True, tree=True), GROUPS, None),
        "spans": (Case(WHOLE, MANY, 4, 2, 8, 4, spans=True), GROUPS, None),
        "int8": (Case(WHOLE, MANY, 4, 2, 8, 4, packed=True), GROUPS, "int8"),
        "latent": (Case(LENGTHS, NEW, 4, 1, 12, 4, rank=8, scale=0.3), GROUPS, None),
        "nobody shares": (Case(LENGTHS, NEW, 4, 2, 8, 4), {}, None),
    }


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """As many groups as there are rows, at the most."""
    monkeypatch.setattr(prefixes, "WORTH_ROWS", 0)


def run(function, arrays, **static):
    return jax.jit(functools.partial(function, **static))(arrays)


@pytest.mark.parametrize("name", CASES)
def test_rows_get_what_they_get_by_themselves(name):
    case, groups, kind = CASES[name]
    sharing.check(reference_backend if kind is None else xla, run, case, groups, kind)


def test_where_nobody_shares_the_first_call_is_not_made():
    """Tables that nothing of may be read by the first pass, and every row's result to the bit."""
    case = Case((13, 5), (1, 1), 2, 1, 8, 4)
    inputs = testing.make_inputs(case)
    shared = jnp.zeros((4, 2), jnp.int32).at[1].set(jnp.arange(2))
    calls = []

    def attend(q, *bundles):
        jax.debug.callback(lambda x: calls.append(x.shape), q)
        return reference.attend(q, *bundles)

    @jax.jit
    def both(shared):
        once = cascade.read_once(reference.attend, attend, bundle_call(shared=shared, **inputs._asdict()))
        return once, reference.paged_attention(*inputs)

    once, alone = both(shared)
    jax.effects_barrier()
    np.testing.assert_array_equal(once, alone)
    assert not calls
    both(shared.at[0, 0].set(4).at[3, 0].set(1))
    jax.effects_barrier()
    assert calls == [(2, 2, 8)]


def shape(*axes, dtype="int32"):
    return jax.ShapeDtypeStruct(axes, dtype)


SHAPES = dict(
    q=shape(64, 1, 8, 128, dtype="bfloat16"), kv=shape(9, 2, 4, 16, 128, dtype="bfloat16"), tables=shape(64, 9),
    lengths=shape(64), new=shape(64),
)  # fmt: skip


@pytest.mark.parametrize(("implementation", "options", "why"), [
    ("xla", {"window": 5}, None), ("xla", {"deterministic": True}, "With deterministic every row is read by itself."),
    ("reference", {}, "The implementation 'reference' reads every row by itself."),
    ("tpu", {}, None), ("gpu", {}, None),
    ("tpu", {"window": 5}, "With a window the tpu kernels read every row by itself."),
    ("gpu", {"chunk": 5}, "With a chunk the gpu kernels read every row by itself."),
    # Decode fits, and queries of all rows at once do not.
    ("tpu", {"q": shape(64, 1, 2048, 128, dtype="bfloat16")}, "of a TPU's vector memory"),
])  # fmt: skip
def test_who_reads_alone(implementation, options, why):
    """A decode step that reads once has the kernel of many queries; one that does not is the program without it."""
    found = cascade.cascade_refusal(implementation, bundle_call(**SHAPES | options))
    assert found is None if why is None else why in found
    if implementation in ("tpu", "gpu"):
        attend = functools.partial(pallas_kernels.paged_attention, implementation=implementation)
        step = SHAPES | options | {"shared": shape(4, 64)}
        static = {name: step.pop(name) for name in ("window", "chunk") if name in step}
        arrays = [step.pop(name) for name in ("q", "kv", "tables", "lengths", "new")]
        program = str(jax.make_jaxpr(functools.partial(attend, **static))(*arrays, **step))
        assert ("paged_prefill" in program) == (why is None)
