"""What type checkers see of the library: a user's file with planted mistakes, all of which pyright finds."""

import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest

import jaxkv
from jaxkv._engine.frontend.options import EngineOptions

pytest.importorskip("basedpyright", reason="the extra 'test' is not installed")
ROOT = pathlib.Path(jaxkv.__file__).parents[1]

# A line that ends in `# mistake` has one; no other line may be reported.
PROGRAM = '''
import jax
import jax.numpy as jnp

import jaxkv
import pallas_kernels

layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
config = jaxkv.CacheConfig(layers=(layer,) * 2, max_seqs=2, max_seq_len=64, num_blocks=8)
uniform = jaxkv.CacheConfig.uniform(num_layers=2, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64, num_blocks=8)
cache = jaxkv.extend(jaxkv.init(config), [1, 1])
q, kv = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 2, 8))

out, cache = jaxkv.attention(q, kv, kv, cache, layer=0, window=4)
(out, lse), cache = jaxkv.attention(q, kv, kv, cache, layer=0, return_lse=True)
y, first = jaxkv.attention(q, kv, kv, cache.layers[0])
print(out.shape, lse.dtype, first.held, cache.with_layer(0, first).lengths, jaxkv.attend(q, cache, layer=0).shape)
print(jaxkv.load("file").lengths, jaxkv.load("file", into=cache).config, config.num_blocks, uniform.bytes)

print(jaxkv.init(config).lenghts)  # mistake
print(out.shpe)  # mistake
print(cache.layers[0].helt)  # mistake
print(jaxkv.load("file").tabels)  # mistake
jaxkv.attention(q, kv, kv, cache, layer=0, windw=4)  # mistake
jaxkv.attend(q, cache, layr=0)  # mistake
jaxkv.models.lod("folder")  # mistake
jaxkv.testing.posion(cache)  # mistake
jaxkv.nnx.Atention  # mistake
jaxkv.CacheConfig.uniform(num_layers=2, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64, blocks=8)  # mistake
pallas_kernels.testing.Cases  # mistake


class Model:
    """One's own."""

    layer_configs = (layer,)
    dtype = jnp.float32

    def __call__(
        self, tokens: jax.Array, *, cache: jaxkv.Cache, logits_at: jax.Array | None = None
    ) -> tuple[jax.Array, jaxkv.Cache]:
        return jnp.zeros((*tokens.shape, 3)), cache


class WithoutCache:
    """A model that forgets its cache."""

    layer_configs = (layer,)
    dtype = jnp.float32

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.zeros((*tokens.shape, 3))


engine = jaxkv.Engine(Model(), max_seqs=2, num_blocks=8)
engine = jaxkv.Engine(jaxkv.models.load("folder"), longest=100)
tokens: list[list[int]] = jaxkv.generate(Model(), [[1, 2]], prefix_cache=True)
samples: list[list[list[int]]] = jaxkv.generate(Model(), [[1, 2]], n=2)
logits, cache = jaxkv.models.small()(jnp.ones((2, 1), jnp.int32), cache=cache)
print(logits.shape, cache.lengths, engine.submit([1]).tokens)

jaxkv.Engine(Model(), max_seq=2)  # mistake
jaxkv.Engine(WithoutCache())  # mistake
jaxkv.generate(Model(), [[1, 2]], max_tokns=3)  # mistake
engine.submit([1], max_tokens=3)  # mistake
'''


def test_pyright_finds_planted_mistakes_and_nothing_else(tmp_path):
    (tmp_path / "user.py").write_text(PROGRAM)
    settings = {"typeCheckingMode": "standard", "include": ["user.py"], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings | {"reportUnusedExpression": False}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(tmp_path)]
    result = subprocess.run([*command, "--pythonpath", sys.executable], capture_output=True, text=True, check=False)
    found = {entry["range"]["start"]["line"] for entry in json.loads(result.stdout)["generalDiagnostics"]}
    planted = {i for i, line in enumerate(PROGRAM.splitlines()) if line.endswith("# mistake")}
    assert len(planted) >= 10
    assert found == planted, [PROGRAM.splitlines()[i] for i in found ^ planted]


def test_options_handed_on_are_those_of_an_engine():
    own = set(inspect.signature(jaxkv.Engine.__init__).parameters) - {"self", "model", "fields", "seed"}
    handed_on = EngineOptions.__optional_keys__
    assert own <= handed_on, f"generate does not hand on {own - handed_on}: add them to EngineOptions."
    fields = set(inspect.signature(jaxkv.CacheConfig.from_model).parameters)
    assert handed_on - own <= fields | {
        "block_size",
        "layout",
        "head_dim_multiple",
        "join_kv",
        "stacked",
        "residual_length",
    }


def test_completion_knows_what_is_imported_late():
    late = set(re.findall(r"(\w+) as \1", pathlib.Path(jaxkv.__file__).read_text().split("TYPE_CHECKING:")[1]))
    assert late and late | set(jaxkv.__all__) <= set(dir(jaxkv))
