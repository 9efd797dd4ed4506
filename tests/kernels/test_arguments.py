"""Every bad input of the front door raises one sentence: what was expected, what came, and the way out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.testing import Case

# Argument, what it is made of, and what the sentence must say. `i` are inputs of 2 rows, 4 heads over 2, head_dim 64.
BAD = {
    "pool's rank": (
        lambda i: {"kv": i.kv[0]},
        r"kv must be a pool \[num_blocks \+ 1, 2, K, block_size, D\].*\(2, 2, 16, 64\)",
    ),
    "pool's halves": (lambda i: {"kv": i.kv[:, :1]}, r"kv must be a pool"),
    "tables' rank": (lambda i: {"tables": i.tables[0]}, r"tables must be i32\[rows, max_blocks_per_seq\].*\(2,\)"),
    "lengths' rows": (
        lambda i: {"lengths": i.lengths[:1]},
        r"lengths must have one entry for each of the 2 rows.*\(1,\)",
    ),
    "new's rank": (lambda i: {"new": i.new[0]}, r"new must have one entry for each of the 2 rows"),
    "offsets' rows": (lambda i: {"offsets": jnp.zeros(3, jnp.int32)}, r"offsets must have one entry .* 2 rows.*\(3,\)"),
    "tables' dtype": (
        lambda i: {"tables": i.tables.astype(jnp.float32)},
        r"tables must be int32, not float32.*tables.astype",
    ),
    "tables in lists": (lambda i: {"tables": i.tables.tolist()}, "tables must be an array, not a list.*jnp.asarray"),
    "lengths in a list": (lambda i: {"lengths": i.lengths.tolist()}, "lengths must be an array, not a list"),
    "lengths' dtype": (lambda i: {"lengths": i.lengths.astype(jnp.uint32)}, r"lengths must be int32, not uint32"),
}
K5V3_ROWS = (
    lambda i: {
        "kind": "k5v3", "rank": 32, "kv": i.kv[:, :1].astype(jnp.uint8), "kv_scale": jnp.ones((7, 1, 2, 16, 1)),
    },
    r"rows have scales of both apart, kv_scale \(7, 2, 2, 16, 1\), not \(7, 1, 2, 16, 1\): store latent rows in",
)  # fmt: skip
INT8_ROWS = {"kind": "int8", "rank": 32, "scale": 0.1}
BAD_ATTENTION = BAD | {
    "q's rank": (lambda i: {"q": i.q[0, 0]}, r"q must be padded \[S, T, H, D\] or packed \[N, H, D\].*\(4, 64\)"),
    "q in lists": (lambda i: {"q": i.q.tolist()}, "q must be an array, not a list"),
    "q's rows": (lambda i: {"q": i.q[:1]}, r"q has 1 rows, but the tables have 2"),
    "q's dtype": (lambda i: {"q": i.q.astype(jnp.int32)}, r"q must be floating point, not int32"),
    "heads": (
        lambda i: {"q": i.q[:, :, :3]},
        r"3 query heads cannot be shared among 2 KV heads: H must be a multiple of K",
    ),
    "head_dim": (lambda i: {"q": jnp.zeros((2, 1, 4, 65))}, r"q has head_dim 65, but the pool stores 64"),
    "kv_scale": (
        lambda i: {"kv_scale": i.kv},
        r"kv_scale must have the pool's shape without its last axis, \(7, 2, 2, 16\)",
    ),
    "kv_scale of latent rows": (
        lambda i: INT8_ROWS | {"kv": i.kv[:, :1].astype(jnp.int8), "kv_scale": jnp.ones((7, 1, 2, 16))},
        r"and two, \(7, 1, 2, 16, 2\) \(or \(7, 2, 2, 16\), where keys stand behind the values\), not \(7, 1, 2, 16\)",
    ),
    "k5v3 of latent rows": K5V3_ROWS,
    "int4's scales as of joined rows": (
        lambda i: (
            INT8_ROWS | {"kind": "int4", "kv": i.kv[:, :1].astype(jnp.uint8), "kv_scale": jnp.ones((7, 2, 2, 16))}
        ),
        r"one for every 32 entries of a head, .7, 1, 2, 16, 2. \(or \(7, 2, 2, 16, 1\), where .*, not \(7, 2, 2, 16\)",
    ),
    "scale's shape": (lambda i: {"scale": jnp.ones(4)}, r"scale must be a number or a scalar array.*\(4,\)"),
    "scale 0": (lambda i: {"scale": 0.0}, r"scale must be a finite number above 0, not 0.0"),
    "scale NaN": (lambda i: {"scale": float("nan")}, r"scale must be a finite number above 0, not nan.*default"),
    "soft_cap": (lambda i: {"soft_cap": -30.0}, r"soft_cap must be a finite number above 0, not -30.0"),
    "soft_cap's shape": (lambda i: {"soft_cap": np.ones(1)}, r"soft_cap must be a number or a scalar array"),
    "window": (
        lambda i: {"window": 0},
        r"window must be an integer from 1 to 2147483647, not 0: None means no window",
    ),
    "sinks": (lambda i: {"sinks": jnp.ones(2)}, r"sinks must have one entry for each of the 4 query heads.*\(2,\)"),
    "mask's dtype": (
        lambda i: {"mask": jnp.ones((2, 1, 48))},
        r"mask must be bool\[2, 1, C\], not float32\[2, 1, 48\]",
    ),
    "mask's tokens": (
        lambda i: {"mask": jnp.ones((2, 3, 48), bool)},
        r"mask must be bool\[2, 1, C\], not bool\[2, 3, 48\]",
    ),
    "implementation": (
        lambda i: {"implementation": "triton"},
        r"implementation must be None or one of xla, .*, not 'triton'",
    ),
}
BAD_WRITE = BAD | {
    "k5v3 of latent rows": (lambda i: K5V3_ROWS[0](i) | {"v": None}, K5V3_ROWS[1]),
    "k's rank": (lambda i: {"k": i.q[0, 0], "v": i.q[0, 0]}, r"k must be padded \[S, T, K, D\] or packed \[N, K, D\]"),
    "k's rows": (lambda i: {"k": i.q[:1, :, :2], "v": i.q[:1, :, :2]}, r"k has 1 rows, but the tables have 2"),
    "k and v": (lambda i: {"v": i.q[:, :, :2, :32]}, r"k and v must be alike.*\[2, 1, 2, 64\].*\[2, 1, 2, 32\]"),
    "k and v's dtype": (lambda i: {"v": i.q[:, :, :2].astype(jnp.bfloat16)}, r"k and v must be alike.*v is bfloat16"),
    "KV heads": (lambda i: {"k": i.q, "v": i.q}, r"k has 4 heads, but the pool has 2 KV heads"),
    "KV head_dim": (lambda i: dict.fromkeys(("k", "v"), jnp.zeros((2, 1, 2, 65))), r"k has head_dim 65.*stores 64"),
}  # fmt: skip


def good():
    inputs = testing.make_inputs(Case(lengths=(5, 17), new=(1, 1)))
    return inputs, {name: getattr(inputs, name) for name in ("kv", "tables", "lengths", "new")}


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_attention(name):
    inputs, arguments = good()
    change, message = BAD_ATTENTION[name]
    with pytest.raises(ValueError, match=message):
        pallas_kernels.paged_attention(**({"q": inputs.q} | arguments | change(inputs)))


@pytest.mark.parametrize("name", BAD_WRITE)
def test_write(name):
    inputs, arguments = good()
    change, message = BAD_WRITE[name]
    tokens = {"k": inputs.q[:, :, :2], "v": inputs.q[:, :, :2]}
    with pytest.raises(ValueError, match=message):
        pallas_kernels.write_kv(**(tokens | arguments | change(inputs)))


@pytest.mark.parametrize("name", ["tables' dtype", "heads", "k and v", "mask's tokens"])
def test_write_and_attend(name):
    inputs, arguments = good()
    change, message = (BAD_ATTENTION | BAD_WRITE)[name]
    tokens = {"q": inputs.q, "k": inputs.q[:, :, :2], "v": inputs.q[:, :, :2]}
    with pytest.raises(ValueError, match=message):
        pallas_kernels.write_and_attend(**(tokens | arguments | change(inputs)))


def test_what_is_wrong_is_known_when_traced():
    """No value is needed: errors come from shapes and dtypes, before anything is compiled."""
    inputs, _ = good()
    with pytest.raises(ValueError, match="3 query heads"):
        jax.eval_shape(pallas_kernels.paged_attention, inputs.q[:, :, :3], *inputs[1:])


NO_ARRAYS = [True, 1, 1.5, float("nan"), "1", b"1", [], [1], {}, object(), np.array("a"), np.bool(True), jnp.int32(2)]
NO_INTEGERS = [True, 1.5, 0, -1, 2**31, 10**5000, np.int64(2**40), np.ones((2, 3)), np.bool(True), jnp.int32(2), "1"]
NO_NUMBERS = [True, -1, 0, 10**400, 10**5000, float("inf"), np.array(-1.0), np.ones((2, 3)), jnp.ones(1), "1", [], 1j]
NO_FLAGS = [1, 0, None, "", 10**5000, np.array(True), jnp.array(True), np.ones((2, 3)), [True]]
NO_NAMES = [1, 10**5000, "", "a", b"1", [], {}, np.ones((2, 3)), np.array("a"), True]
NO_KIND = {
    **dict.fromkeys(("sinks", "mask", "alibi", "spans", "tree", "blocks", "shared", "stripe", "tokens"), NO_ARRAYS),
    **{name: [*NO_ARRAYS, None] for name in ("q", "kv", "tables", "lengths", "new")},
    **dict.fromkeys(("offsets", "kv_scale"), NO_ARRAYS),
    **dict.fromkeys(("rank", "window", "chunk", "sink_tokens", "residual_length"), NO_INTEGERS),
    **dict.fromkeys(("scale", "soft_cap"), NO_NUMBERS),
    **dict.fromkeys(("causal", "deterministic", "return_lse"), NO_FLAGS),
    **dict.fromkeys(("kind", "implementation"), NO_NAMES),
}


def assert_sentences(name, values, call, **arguments):
    for value in values:
        with pytest.raises(ValueError) as error:
            call(**arguments | {name: value})
        sentence = str(error.value)
        assert sentence.startswith((f"{name} ", "k and v ")), (value, sentence)
        assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 250, (value, sentence)


@pytest.mark.parametrize("name", NO_KIND)
def test_what_is_of_another_kind_is_one_sentence(name):
    """What is refused leaves nothing behind: a good call runs after it."""
    inputs, arguments = good()
    tokens = dict.fromkeys(("k", "v"), inputs.q[:, :, :2])
    assert_sentences(name, NO_KIND[name], pallas_kernels.paged_attention, q=inputs.q, **arguments)
    assert_sentences(name, NO_KIND[name], pallas_kernels.write_and_attend, q=inputs.q, **arguments, **tokens)
    if name in ("kv", "tables", "lengths", "new", "offsets", "kv_scale", "kind", "rank", "stripe", "implementation"):
        assert_sentences(name, NO_KIND[name], pallas_kernels.write_kv, **arguments, **tokens)
    values = [x for x in NO_KIND[name] if x is not None]  # which is not known
    assert_sentences(name, values, pallas_kernels.explain, q=inputs.q, **arguments)
    pallas_kernels.paged_attention(q=inputs.q, **arguments, return_lse=True)


def test_what_else_is_of_another_kind():
    inputs, arguments = good()
    tokens = dict.fromkeys(("k", "v"), inputs.q[:, :, :2])
    for name in tokens:
        assert_sentences(name, [*NO_ARRAYS, None], pallas_kernels.write_kv, **arguments | tokens)
    for name in ("op", "platform"):
        assert_sentences(name, NO_NAMES, pallas_kernels.explain, q=inputs.q, **arguments)


@pytest.mark.parametrize("name", ["scale", "soft_cap"])
def test_an_integer_beyond_those_of_jax_is_the_number_that_it_is(name):
    inputs, arguments = good()
    wanted = pallas_kernels.paged_attention(q=inputs.q, **arguments, **{name: 2.0**40})
    for same in (2**40, np.int64(2**40), np.array(2**40), np.float64(2**40)):
        found = pallas_kernels.paged_attention(q=inputs.q, **arguments, **{name: same})
        assert (found == wanted).all(), same
    assert not (wanted == pallas_kernels.paged_attention(q=inputs.q, **arguments, **{name: 1})).all()


def test_a_named_implementation_says_what_it_does_not_support(monkeypatch):
    from pallas_kernels import tpu

    inputs, arguments = good()
    arguments["q"] = inputs.q
    sentence = "The tpu kernel needs a head_dim of 128, not 64: use implementation=None."
    monkeypatch.setattr(tpu, "paged_attention", lambda **_: None, raising=False)
    monkeypatch.setattr(tpu, "unsupported", lambda op, arguments: sentence, raising=False)
    with pytest.raises(NotImplementedError, match=sentence):
        pallas_kernels.paged_attention(**arguments, implementation="tpu")
    with pytest.raises(NotImplementedError, match=sentence):
        pallas_kernels.explain(**arguments, implementation="tpu")
    choice = pallas_kernels.explain(**arguments, platform="tpu")
    assert choice == ("xla", sentence)  # without a name it is no error but a reason


def test_an_implementation_without_a_kernel_for_the_op():
    inputs, arguments = good()
    tokens = {"q": inputs.q, "k": inputs.q[:, :, :2], "v": inputs.q[:, :, :2]}
    with pytest.raises(NotImplementedError, match="reference backend has no kernel of its own for write_and_attend"):
        pallas_kernels.explain("write_and_attend", implementation="reference", **arguments, **tokens)
    out, _ = pallas_kernels.write_and_attend(**arguments, **tokens, implementation="reference")  # one after the other
    assert out.shape == inputs.q.shape


def test_good_arguments_raise_nothing():
    """So that the errors above are those of the change that was made."""
    inputs, arguments = good()
    pallas_kernels.paged_attention(q=inputs.q, **arguments)
    pallas_kernels.write_kv(k=inputs.q[:, :, :2], v=inputs.q[:, :, :2], **arguments)
    integers = {name: np.asarray(arguments[name], np.int64) for name in ("tables", "lengths", "new")}
    pallas_kernels.explain(q=inputs.q, kv=arguments["kv"], **integers)  # of which only shapes are read
