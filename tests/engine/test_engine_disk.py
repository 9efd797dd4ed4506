"""An engine whose prefix cache reaches to the disk: the next process goes on from what this one has computed."""

import dataclasses
import pathlib
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from checksum_model import LONGEST, VOCAB, WINDOW, Checksum, assert_streams, continuation
from nightly import NIGHTLY

import jaxkv
from jaxkv._engine.runner.fingerprint import fingerprint

WINDOWS = (None, WINDOW)
DRAW = random.Random(11)
PROMPTS = [[DRAW.randrange(VOCAB) for _ in range(n)] for n in (40, 37, 40, 31, 38)]
COUNTS = [5, 3, 1, 8, 4]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """A checksum model with a parameter, by which files know whose they are."""

    scale: jax.Array
    inner: Checksum = dataclasses.field(default=Checksum(WINDOWS), metadata={"static": True})

    layer_configs = property(lambda self: self.inner.layer_configs)
    dtype = property(lambda self: self.inner.dtype)

    def __call__(self, tokens, *, cache, logits_at):
        logits, cache = self.inner(tokens, cache=cache, logits_at=logits_at)
        return logits * self.scale, cache


def make_engine(folder, scale=1.0, **fields):
    sizes = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 3, "num_blocks": 40, "step_tokens": 7}
    reuse = {"prefix_cache": True, "spill_bytes": 3000, "disk": folder, "disk_bytes": 10**6}
    return jaxkv.Engine(Weighted(jnp.float32(scale)), **sizes | reuse | fields)


def serve(engine):
    """What an engine has saved of the prompts' tokens; every token of it is checked."""
    before = engine.stats()["tokens_saved"]
    expected = [continuation(WINDOWS, *one, None) for one in zip(PROMPTS, COUNTS, strict=True)]
    assert_streams(engine, PROMPTS, COUNTS, expected, None)
    engine.prefix.check_invariants(engine.cache)
    engine.prefix.flush(engine.cache)
    return (engine.stats()["tokens_saved"] - before) / sum(map(len, PROMPTS))


def test_the_next_engine_saves_what_this_one_has_computed(tmp_path):
    assert serve(make_engine(tmp_path)) == 0
    assert make_engine(tmp_path, scale=2.0).prefix.match(PROMPTS[0]).num_tokens == 0, "another model's"
    assert serve(make_engine(tmp_path)) >= 0.9


@pytest.mark.skipif(not NIGHTLY, reason="tests/tiers/test_prefix_disk.py damages files by day, without an engine")
def test_damaged_files_are_computed_anew(tmp_path):
    serve(make_engine(tmp_path))
    for path in [path for path in sorted(tmp_path.rglob("*")) if path.is_file()][::3]:
        data = bytearray(path.read_bytes())
        data[DRAW.randrange(len(data))] ^= 8
        path.write_bytes(data)
    engine = make_engine(tmp_path)
    assert serve(engine) < 0.9 and engine.stats()["disk_blocks_damaged"] > 0


@pytest.mark.skipif(not NIGHTLY, reason="another process compiles everything anew")
def test_the_next_process_saves_what_this_one_has_computed(tmp_path):
    serve(make_engine(tmp_path))
    here = pathlib.Path(__file__).parent
    program = (
        f"import sys; sys.path[:0] = {[str(here), str(here.parent / 'support')]!r}; from test_engine_disk import *\n"
        "print(serve(make_engine(sys.argv[1])))"
    )
    result = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) >= 0.9


def test_bad_options_are_one_sentence_each(tmp_path):
    for fields, sentence in [
        ({"prefix_cache": False}, "^disk= is for a prefix cache: give prefix_cache=True, too, or leave it out"),
        ({"prefix_cache": False, "disk": None}, "^disk_bytes= is for a prefix cache"),
        (
            {"prefix_cache": False, "disk": None, "disk_bytes": None, "spill_bytes": 1},
            "^spill_bytes= is for a prefix cache",
        ),
        ({"spill_bytes": 0}, "spill_bytes must hold at least one"),
        ({"disk_bytes": "much"}, "disk_bytes must be a number, not 'much'"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            make_engine(tmp_path, **fields)
    with pytest.raises(ValueError, match="disk= needs a model that is a pytree of its parameters"):
        jaxkv.Engine(Checksum(), prefix_cache=True, spill_bytes=3000, disk=tmp_path, disk_bytes=10**6)


def test_a_fingerprint_tells_models_apart():
    x = jnp.arange(6, dtype=jnp.float32)
    models = [
        [x, x + 1], [x + 1, x], [x], [x[::-1]], [x.reshape(2, 3)], [x.astype(jnp.bfloat16)],
        [x.at[3].set(-3)], [-x], [x > 2], [x.astype(jnp.complex64)], [x.astype(jnp.int4)], [x.astype(jnp.int4)[::-1]],
        [x[:0]], [jnp.uint8(3)],
    ]  # fmt: skip
    prints = [fingerprint(model) for model in models]
    assert len(set(prints)) == len(prints)
    assert prints == [fingerprint([jnp.array(y) for y in model]) for model in models]
    assert fingerprint([x, jax.random.key(0)]) == fingerprint([x, jax.random.key(1)]) not in prints
