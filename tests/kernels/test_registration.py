"""Kernels of one's own, and what of this package is reachable by name."""

import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jaxkv
import pallas_kernels
from pallas_kernels import reference, reference_mixers, testing
from pallas_kernels.api import backends
from pallas_kernels.api.attention_dispatch import forget_choices
from pallas_kernels.common.batch import Call, MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.gpu import interpreter


def make_backend(calls, **changes):
    """The reference as a backend of one's own, which counts its calls."""

    def paged_attention(*arguments):
        calls.append("attend")
        return reference.attend(*arguments)

    names = dict(FORMATS=(), OPTIONS=(), READS_LATENT_ROWS=False, READS_SHARED_ONCE=False, write_kv=None,
                 write_and_attend=None, unsupported=lambda op, call: None, paged_attention=paged_attention)  # fmt: skip
    return types.SimpleNamespace(**names | changes)


@pytest.fixture(autouse=True)
def as_before():
    """What a test registers is forgotten after it, also a name that was registered before."""
    registries = backends.IMPLEMENTATIONS, backends.REGISTERED
    before = [dict(registry) for registry in registries]
    yield
    for registry, found in zip(registries, before, strict=True):
        registry.clear()
        registry.update(found)
    forget_choices()


HERE = backends.current_platform()
ELSEWHERE = next(platform for platform in ("tpu", "cpu") if platform != HERE)
CASE = testing.Case(lengths=(5, 17), new=(1, 1), block_size=8, head_dim=16)


def make_mixers(calls):
    """The reference's gated delta rule as a backend's mixers, which takes no more than 4 heads."""

    def gated_delta_rule(*arguments, **named):
        calls.append("delta")
        return reference_mixers.gated_delta_rule(*arguments, **named)

    def unsupported(call):
        assert call.token_axes == call.arrays["v"].shape[:-2]
        return "It takes no more than 4 heads." if call.arrays["v"].shape[-2] > 4 else None

    return types.SimpleNamespace(gated_delta_rule=gated_delta_rule, unsupported=unsupported)


def make_delta(heads, axes=(2, 3)):
    """Returns what the door takes, by name."""
    q, v, g = (jnp.full((*axes, heads, *inner), 0.5) for inner in ((4,), (2,), ()))
    rows = {"slots": jnp.array([1, 0]), "lengths": jnp.array([5, 3]), "new": jnp.array([3, 3])}
    return dict(q=q, k=q, v=v, g=-g, beta=g, states=jnp.ones((3, heads, 4, 2)), **rows)


def test_a_registered_backend_may_have_mixers():
    calls, door = [], pallas_kernels.gated_delta_rule
    pallas_kernels.register_backend("mine", make_backend([], mixers=make_mixers(calls)), platform=HERE)
    few, many = make_delta(4), make_delta(5)
    choices = [pallas_kernels.explain("gated_delta_rule", **x) for x in (few, many)]
    assert [choice.implementation for choice in choices] == ["mine", "xla"]
    assert choices[1].reason == "It takes no more than 4 heads."
    assert not calls
    for found, wanted in zip(door(**few), door(**few, implementation="reference"), strict=True):
        testing.assert_close(found, wanted)
    assert calls == ["delta"]  # traced once, in a branch: only XLA runs what is lowered for another platform
    with pytest.raises(NotImplementedError, match="no more than 4 heads"):
        door(**many, implementation="mine")
    with pytest.raises(NotImplementedError, match="mine backend has no kernel of its own for state_space"):
        pallas_kernels.explain("state_space", implementation="mine")

    def loss(v, implementation):
        y, states = door(**few | {"v": v}, implementation=implementation)
        return jnp.sum(jnp.sin(y)) + jnp.sum(states)

    testing.assert_close(jax.grad(loss)(few["v"], "mine"), jax.grad(loss)(few["v"], "reference"))


def test_a_kernel_is_not_divided_by_the_compiler():
    pallas_kernels.register_backend("mine", make_backend([], mixers=make_mixers([])), platform=HERE)
    mesh, arguments = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), make_delta(4)
    with jax.set_mesh(mesh):
        choice = pallas_kernels.explain("gated_delta_rule", **arguments)
    assert choice.implementation == "xla" and "jax.shard_map" in choice.reason
    found = []

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    def inside(x):
        found.append(pallas_kernels.explain("gated_delta_rule", **arguments).implementation)
        return x

    inside(jnp.ones(2))
    assert found == ["mine"]


def test_a_registered_backend_runs_where_it_is_named():
    calls, inputs = [], testing.make_inputs(CASE)
    pallas_kernels.register_backend("mine", make_backend(calls))
    out = pallas_kernels.paged_attention(*inputs, implementation="mine")
    testing.assert_close(out, testing.expected(CASE, inputs))
    assert calls == ["attend"]
    pallas_kernels.paged_attention(*inputs)
    assert calls == ["attend"]
    replaced = []
    pallas_kernels.register_backend("mine", make_backend(replaced))
    pallas_kernels.paged_attention(*inputs, implementation="mine")
    assert (calls, replaced) == (["attend"], ["attend"])


def test_it_is_tried_first_on_its_platform():
    calls = []
    cache = jaxkv.init(jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=1, head_dim=8, max_seqs=2, max_seq_len=32))
    cache, x = jaxkv.extend(cache, [1, 1]), jnp.ones((2, 1, 1, 8), jnp.bfloat16)
    wanted, _ = jaxkv.attention(x, x, x, cache, layer=0)
    refused = make_backend(calls, unsupported=lambda op, call: "It takes no head_dim of 8.")
    pallas_kernels.register_backend("picky", refused, HERE)
    choice = jaxkv.explain(x, cache, platform=HERE)
    assert choice.implementation == "xla" and (HERE != "cpu" or choice.reason == "It takes no head_dim of 8.")
    pallas_kernels.register_backend("mine", make_backend(calls), HERE)
    assert jaxkv.explain(x, cache, platform=HERE).implementation == "mine"
    out, _ = jaxkv.attention(x, x, x, cache, layer=0)
    assert calls and jnp.array_equal(out, wanted)
    assert jaxkv.explain(x, cache, platform=ELSEWHERE).implementation != "mine"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("xla", make_backend([])), "none of xla, reference, gpu, tpu, not 'xla'"),
        (("my kernel", make_backend([])), "not 'my kernel'"),
        (("mine", functools), "'functools' has no FORMATS and no OPTIONS"),
        (("mine", make_backend([]), "abacus"), "platform must be None or one of cpu, cuda"),
    ],
)
def test_what_cannot_be_registered(arguments, says):
    before = dict(backends.IMPLEMENTATIONS)
    with pytest.raises(ValueError, match=says):
        pallas_kernels.register_backend(*arguments)
    assert before == backends.IMPLEMENTATIONS


def test_modules_are_reachable_by_name():
    assert {"gpu", "testing", "tpu", "xla", "register_backend"} <= set(dir(pallas_kernels))
    program = "import pallas_kernels; print(pallas_kernels.testing.Case.__name__, pallas_kernels.xla.__name__)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.split() == ["Case", "pallas_kernels.xla"]
    with pytest.raises(AttributeError, match="has no attribute 'testin'"):
        pallas_kernels.testin  # noqa: B018


def test_the_gpu_interpreter_says_where_it_may_hang(monkeypatch):
    monkeypatch.setattr(interpreter, "count_cores", lambda: 2)
    devices = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda platform: devices[:1])
    inputs = testing.make_inputs(CASE)
    with pytest.raises(RuntimeError, match=r"XLA has 2 threads and it wants 4: call jax.config.update\('jax_num_cpu"):
        testing.run(pallas_kernels.gpu.paged_attention, *inputs, interpret=True)
    monkeypatch.setattr(jax, "devices", lambda platform: devices * 4)
    interpreter.check_interpreter_threads()


def test_help_names_what_a_backend_is_asked_for():
    """All members, and all options that a call may have beyond plain causal attention."""
    described = pallas_kernels.Backend.__doc__
    members = re.findall(r"^      (\w+): ", described, re.MULTILINE)
    assert members == [*pallas_kernels.Backend.__annotations__, "mixers"]
    mask = MaskSpec(causal=False, **{name: 1 for name in ("chunk", "sink_tokens", "residual_length", "compress_ratio")})
    mask = dataclasses.replace(mask, **{name: 1 for name in ("spans", "tree", "blocks", "tokens")})
    batch = PagedBatch(None, None, None, context_shard=1)
    call = Call(StoredKV(None), batch, mask, SoftmaxOptions(alibi=1, deterministic=True))
    (options,) = re.findall(r"OPTIONS: .*?, of (.*?)\. A call", described, re.DOTALL)
    assert re.findall(r"`(\w+)`", options) == sorted(call.given_options())
    assert len(call.given_options()) == len(re.findall(r'"\w+":', inspect.getsource(Call.given_options)))
