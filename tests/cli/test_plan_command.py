"""The planner: its figures are those of the cache that is made from them."""

import json
import re
import types

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv._cli.main import main
from jaxkv._cli.memory_plan import plan

GLOBAL = jaxkv.LayerConfig(num_kv_heads=2, head_dim=24)
LOCAL = jaxkv.LayerConfig(num_kv_heads=2, head_dim=24, window=9)
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 100,
}  # fmt: skip


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layers", [(GLOBAL,) * 2, (LOCAL, GLOBAL, LOCAL), (LOCAL,)])
@pytest.mark.parametrize("multiple", [1, 32])
def test_a_plan_is_the_cache_that_is_made(layers, block_size, dtype, multiple):
    memory = 600_000
    fields = dict(block_size=block_size, dtype=dtype, head_dim_multiple=multiple)
    found = plan(layers, memory, max_seq_len=100, step_tokens=8, **fields)
    cache = jaxkv.init(found.config)
    made = sum(x.nbytes for x in jax.tree.leaves(cache.pools))
    assert made == found.config.bytes <= memory
    heads = 2 * 2 * (32 if multiple == 32 else 24) * (2 if dtype == "bfloat16" else 4)
    assert found.bytes_per_token == heads * len(layers)
    # Not one block more would have fitted in the layers that keep most.
    keep_most = [layer for layer in layers if layer.window is None] or layers
    assert made + heads * block_size * len(keep_most) > memory
    assert found.tokens == cache.capacity
    model = types.SimpleNamespace(layer_configs=layers, dtype=dtype)
    same = jaxkv.CacheConfig.from_model(
        model, max_seqs=found.config.max_seqs, max_seq_len=100, memory_bytes=memory,
        step_tokens=max(8, found.config.max_seqs), **fields,
    )  # fmt: skip
    assert same == found.config


@pytest.mark.parametrize("layers", [(GLOBAL,) * 2, (LOCAL, GLOBAL, LOCAL), (LOCAL,)])
def test_as_many_rows_as_planned_fit_and_no_more(layers):
    found = plan(layers, 40_000 if len(layers) > 1 else 9_000, max_seq_len=30, step_tokens=8, block_size=4)
    assert 1 < found.rows == found.config.max_seqs < 20
    step = jax.jit(jaxkv.extend)
    cache = jaxkv.init(found.config)
    for _ in range(30):  # token by token, every row at once, which is at most one step's tokens
        cache = step(cache, np.ones(found.rows, np.int32))
    jaxkv.check(cache)
    if layers[0] is GLOBAL:
        assert cache.config.num_blocks < (found.rows + 1) * cache.config.max_blocks_per_seq
    more = plan(layers, 40_000 if len(layers) > 1 else 9_000, max_seqs=found.rows + 1, max_seq_len=30, step_tokens=8,
                block_size=4)  # fmt: skip
    assert more.rows <= found.rows and more.config.max_seqs == found.rows + 1


def test_a_window_makes_room():
    five_to_one = (*(LOCAL,) * 5, GLOBAL)
    with_windows = plan(five_to_one, 10**7, max_seq_len=4000)
    without = plan((GLOBAL,) * 6, 10**7, max_seq_len=4000)
    assert with_windows.rows > 4 * without.rows


def test_waste_is_what_rows_of_random_length_waste():
    found = plan((GLOBAL,), 10**6, max_seq_len=1000, mean_len=200, block_size=16)
    lengths = np.random.default_rng(0).integers(1, 400, 100_000)
    places = -(-lengths // 16) * 16
    assert found.waste == pytest.approx(1 - lengths.sum() / places.sum(), rel=0.02)


def test_what_cannot_be_planned():
    for arguments, says in (
        (dict(mean_len=0), "mean_len must be above 0, not 0"),
        (dict(mean_len=101), "mean_len must be at most max_seq_len = 100, not 101"),
        (dict(step_tokens=0), "step_tokens must be at least 1, not 0"),
        (dict(memory_bytes=100), "memory_bytes=100 is too little"),
        (dict(block_size=0), "CacheConfig.block_size must be at least 1"),
    ):
        with pytest.raises(ValueError, match=says):
            plan((GLOBAL,), **{"memory_bytes": 10**6, "max_seq_len": 100} | arguments)


# The command.


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float16"}))
    return tmp_path


def run(folder, *arguments):
    return main(["plan", "--model", str(folder), *map(str, arguments)])


def test_the_table(folder, capsys):
    assert run(folder, "--memory", "3MB", "--weights", "1MB", "--max-seq-len", 64, "--mean-len", 24) == 0
    out = capsys.readouterr().out
    assert "llama: 3 layers (3 without a window), 2 KV heads of 16." in out
    assert "0.003 GB, 2.9 MiB, of memory less 976.6 KiB of weights (as told) leave 1.9 MiB" in out
    lines = re.findall(r"^ *(\d+)  (.*?)  +(\S+ B) +(\S+) +(\S+) +(\S+) +(\S+)%$", out, re.MULTILINE)
    assert [int(size) for size, *_ in lines] == [8, 16, 32, 64, 128, 256] * 4
    layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),) * 3
    for size, dtype, per_token, blocks, tokens, rows, waste in lines:
        found = plan(layers, 2_000_000, max_seq_len=64, mean_len=24, block_size=int(size), dtype=dtype.split(",")[0])
        assert per_token == f"{found.bytes_per_token:g} B"
        assert "float16" not in dtype or per_token == "384 B"
        figures = f"{found.config.num_blocks:,}", f"{found.tokens:,}", f"{found.rows:,}", f"{found.waste:.2%}"
        assert (blocks, tokens, rows, waste + "%") == figures
    call = re.search(r"(jaxkv.CacheConfig.from_model\(model, .*\))", out)[1]
    model = types.SimpleNamespace(layer_configs=layers, dtype="bfloat16")
    assert eval(call, {"jaxkv": jaxkv, "model": model}).bytes <= 2_000_000


def test_weights_are_the_files_or_what_the_config_says(folder, capsys):
    from flax import nnx

    from jaxkv import models

    assert run(folder, "--memory", "3MB") == 0
    config = models.loader.read_config(folder)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    assert f"({count:,} parameters of float16)" in capsys.readouterr().out
    models.save(model, folder)
    assert run(folder, "--memory", "3MB") == 0
    assert "of weights (1 file)" in capsys.readouterr().out


def test_windows_padding_and_what_does_not_fit(folder, capsys):
    local = CONFIG | {"model_type": "mistral", "sliding_window": 10, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(local))
    assert run(folder, "--memory", "250kB", "--weights", "0", "--head-dim-multiple", 128, "--dtype", "bfloat16") == 0
    out = capsys.readouterr().out
    assert "3 layers (3 of window 10)" in out and "3.0 KiB" in out
    assert re.search(r"^ +64  bfloat16  does not fit *$", out, re.MULTILINE)
    assert "head_dim_multiple=128" in out


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        ({}, ["--memory", "1kB"], "1000 B of memory do not hold 212.9 KiB of weights"),
        ({}, ["--memory", "1kB", "--weights", "0"], "memory_bytes=1000 is too little"),
        ({}, ["--memory", "1MB", "--max-seq-len", "0"], "max_seq_len must be at least 1"),
        ({}, ["--memory", "1MB", "--mean-len", "500"], "mean_len must be at most max_seq_len = "),
        (
            {"model_type": "mamba"},
            ["--memory", "1MB"],
            "is of the family (model_type) 'mamba', but the decoder knows llama",
        ),
        ({"torch_dtype": "int3"}, ["--memory", "1MB"], "has weights of int3, whose size is not known: say it with"),
        (None, ["--memory", "1MB"], "There is no folder"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(folder, capsys, change, arguments, says):
    if change is None:
        folder = folder / "nowhere"
    else:
        (folder / "config.json").write_text(json.dumps(CONFIG | change))
    assert run(folder, *arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("jaxkv: ") and says in err and err.count("\n") == 1 and not out


def test_one_row_too_long(folder, capsys):
    assert run(folder, "--memory", "300kB", "--weights", "200kB", "--max-seq-len", 1000) == 0
    out = capsys.readouterr().out
    assert "Not one can: give max_seq_len less, or more memory." in out
    assert "The model knows 100 positions only." in out
