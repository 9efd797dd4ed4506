"""The planner: its figures are those of the cache that is made from them."""

import json
import re
import types

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv._cli.main import main
from jaxkv._cli.plan.capacity import plan

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
    sizes = dict(max_seq_len=30, step_tokens=8, block_size=4, lengths=[30])
    memory = 40_000 if len(layers) > 1 else 9_000
    found = plan(layers, memory, **sizes)
    assert 1 < found.rows == found.full_rows == found.config.max_seqs < 20
    step = jax.jit(jaxkv.extend)
    cache = jaxkv.init(found.config)
    for _ in range(30):  # token by token, every row at once, which is at most one step's tokens
        cache = step(cache, np.ones(found.rows, np.int32))
    jaxkv.check(cache)
    if layers[0] is GLOBAL:
        assert cache.config.num_blocks < (found.rows + 1) * cache.config.max_blocks_per_seq
    more = plan(layers, memory, max_seqs=found.rows + 1, **sizes)
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


def test_rows_follow_the_lengths_to_expect():
    memory, sizes = 2_000_000, dict(max_seq_len=131_072, block_size=16, dtype="bfloat16")
    few, guessed, told = (
        plan((GLOBAL,) * 2, memory, **sizes, **d) for d in ({"mean_len": 8192}, {}, {"mean_len": 100})
    )
    assert few.rows < guessed.rows < told.rows and guessed.mean_len == 2048
    for found in (few, guessed, told):
        assert found.full_rows == 0 and found.config.max_seqs == max(found.rows, 1)
    blocks = told.config.num_blocks
    assert blocks * 16 // 108 - 1 <= told.rows <= blocks * 16 // 107
    seen = plan((GLOBAL,) * 2, memory, **sizes, lengths=[10, 33, 200])
    assert seen.mean_len == 81 and seen.waste == pytest.approx(1 - 243 / (16 + 48 + 208))
    assert seen.rows == seen.config.num_blocks * 3 // (1 + 3 + 13)
    assert plan((GLOBAL,) * 2, memory, **sizes, mean_len=100, max_seqs=7).rows == 7
    # Tables as wide as the longest row that is asked for would leave room for 34 rows of a billion tokens.
    longest = plan((GLOBAL,) * 2, 100 * memory, **sizes | {"max_seq_len": 10**9}, mean_len=100)
    assert longest.rows > 1000 and longest.full_rows == 0


@pytest.mark.parametrize("layers", [(GLOBAL,) * 2, (LOCAL, GLOBAL, LOCAL)])
def test_so_many_rows_of_the_expected_lengths_do_fit(layers):
    lengths = [3, 9, 30, 17]
    found = plan(layers, 60_000, max_seq_len=30, step_tokens=8, block_size=4, lengths=lengths)
    assert found.rows > found.full_rows > 1
    rows = found.rows // 4 * 4
    counts = np.resize(lengths, rows)
    cache, step = jaxkv.init(found.config), jax.jit(jaxkv.extend)
    for t in range(30):
        cache = step(cache, np.pad(t < counts, (0, found.config.max_seqs - rows)).astype(np.int32))
    jaxkv.check(cache)


def test_what_one_more_token_takes():
    five_to_one = (*(LOCAL,) * 5, GLOBAL)
    short, long = (plan(five_to_one, 10**7, max_seq_len=4000, mean_len=n) for n in (5, 1000))
    assert short.marginal_bytes == short.bytes_per_token == long.bytes_per_token == 6 * long.marginal_bytes


def test_what_cannot_be_planned():
    for arguments, says in (
        (dict(mean_len=0), "mean_len must be above 0, not 0"),
        (dict(mean_len=101), "mean_len must be at most max_seq_len = 100, not 101"),
        (dict(mean_len=float("nan")), "mean_len must be a finite number, not nan"),
        (dict(lengths=[1], mean_len=1), "Say mean_len or lengths, not both"),
        (dict(lengths=[]), "lengths must be a list of integers, not float64.0."),
        (dict(lengths=[3.0]), "lengths must be a list of integers, not float64.1."),
        (dict(lengths=[5, 101]), "lengths must be from 1 to max_seq_len = 100, but go from 5 to 101"),
        (dict(lengths=[0, 7]), "but go from 0 to 7"),
        (dict(step_tokens=0), "step_tokens must be at least 1, not 0"),
        (dict(memory_bytes=100), "100 B for the cache are too little: one block of 16 tokens .* take .* KiB"),
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
    told = ("--memory", "3MB", "--weights", "1MB", "--rest", "0", "--max-seq-len", 64, "--mean-len", 24)
    assert run(folder, *told) == 0
    out = capsys.readouterr().out
    assert "llama: 3 layers (3 without a window), 2 KV heads of 16." in out
    assert "0.003 GB, 2.9 MiB, of memory less 976.6 KiB of weights (as told) and 0 B to compute in leave 1.9 MiB" in out
    lines = re.findall(r"^ *(\d+)  (.*?)  +(\S+ B) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)%$", out, re.MULTILINE)
    assert [int(size) for size, *_ in lines] == [8, 16, 32, 64, 128, 256] * 4
    layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),) * 3
    for size, dtype, per_token, *figures in lines:
        found = plan(layers, 2_000_000, max_seq_len=64, mean_len=24, block_size=int(size), dtype=dtype.split(",")[0])
        assert per_token == f"{found.bytes_per_token:g} B"
        assert "float16" not in dtype or per_token == "384 B"
        counts = found.config.num_blocks, found.tokens, found.rows, found.full_rows
        assert figures == [*(f"{n:,}" for n in counts), f"{found.waste:.2%}"[:-1]]
    call = re.search(r"(jaxkv.CacheConfig.from_model\(model, .*\))", out)[1]
    model = types.SimpleNamespace(layer_configs=layers, dtype="bfloat16")
    assert eval(call, {"jaxkv": jaxkv, "model": model}).bytes <= 2_000_000


def test_over_devices(folder, capsys):
    """Each has so much memory; heads are divided, or whole on each where there are fewer of them."""
    told = ("--memory", "3MB", "--rest", 0, "--max-seq-len", 64, "--block-size", 16, "--dtype", "float32", "--json")
    found = {}
    for devices in (1, 2, 4):
        assert run(folder, *told, "--devices", devices) == 0
        found[devices] = json.loads(capsys.readouterr().out)
    rows, weights = ({n: get(found[n]) for n in found} for get in (
        lambda x: x["options"][0]["rows"], lambda x: x["memory"]["weights"]
    ))  # fmt: skip
    assert rows[2] > 2 * rows[1] and rows[1] < rows[4] < 1.1 * rows[1]  # each of 4 has all heads, and fewer weights
    assert weights[1] < 2 * weights[2] < 1.05 * weights[1] and weights[4] < weights[2]
    assert [found[n]["devices"]["count"] for n in found] == [1, 2, 4] and found[1]["devices"]["moved_per_step"] == 0
    model = types.SimpleNamespace(layer_configs=(jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),) * 3, dtype="float32")
    for devices, parts in ((1, 1), (2, 2), (4, 1)):
        config = jaxkv.CacheConfig.from_model(model, **found[devices]["suggestion"])
        option = found[devices]["options"][0]
        assert list(config.group_blocks) == option["group_blocks"] and config.bytes == parts * option["bytes"]
        assert option["bytes"] + found[devices]["memory"]["weights"] <= 3_000_000
    assert run(folder, *told[:-1], "--devices", 2) == 0
    out = capsys.readouterr().out
    assert "of memory of each of 2 devices less" in out and "Each device holds 1 KV head of a layer;" in out
    for devices, says in ((0, "--devices must be at least 1, not 0"), (10**30, "--devices must be at most")):
        assert run(folder, *told, "--devices", devices) == 2 and says in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": 4}))
    assert run(folder, *told, "--devices", 3) == 2
    assert "4 KV heads cannot be divided among the 3 devices" in capsys.readouterr().err


def test_rows_and_contexts_over_devices(folder, capsys):
    """Parts of the data are alike; devices that share a context have the memory of one that has all of theirs."""
    told = ("--weights", 0, "--rest", 0, "--max-seq-len", 64, "--block-size", 16, "--dtype", "float32", "--json")

    def found(devices, memory):
        assert run(folder, *told, "--memory", memory, "--devices", devices) == 0
        report = json.loads(capsys.readouterr().out)
        return report, report["options"][0]

    (one, option), (many, options) = found("2", "3MB"), found("2x3", "3MB")
    assert many["each_device"] == one["each_device"] and options["bytes"] == option["bytes"]
    assert all(options[name] == 3 * option[name] for name in ("rows", "full_rows", "tokens"))
    assert many["devices"] == {"count": 6, "tensor": 2, "data": 3, "context": 1, "hosts": None} | {
        "moved_per_step": one["devices"]["moved_per_step"]
    }
    assert many["step"]["rows"] == 3 * one["step"]["rows"] == options["rows"]
    (long, option), (runs, options) = found("2", "2MB"), found("2x1x4", "500kB")
    assert options == option | {"bytes": option["bytes"] // 4} and option["bytes"] % 4 == 0
    assert runs["each_device"]["tokens"] * 4 == long["each_device"]["tokens"]
    model = types.SimpleNamespace(layer_configs=(jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),) * 3, dtype="float32")
    for report, shape, axes in ((many, (3, 2), ("data", "model")), (runs, (2, 4), ("model", "context"))):
        config = jaxkv.CacheConfig.from_model(model, **report["suggestion"])
        assert list(config.group_blocks) == report["options"][0]["group_blocks"]
        names = {"context": "context"} if "context" in axes else {"rows": "data"}
        jaxkv.partition_specs(config, jax.sharding.AbstractMesh(shape, axes), **names)
    assert run(folder, *told[:-1], "--memory", "3MB", "--devices", "2x3x4") == 0
    out = capsys.readouterr().out
    assert "of memory of each of 24 devices, 2 tensor x 3 data x 4 context, less" in out
    assert "in two sums over 2 devices a layer and a gather over 4 a layer. With mesh = jax.make_mesh((3, 2, 4)" in out
    assert "jaxkv.init(config, mesh=mesh, context='context', rows='data')" in out


def test_heads_that_are_one_to_a_tpu_are_suggested_no_pairs(folder, capsys):
    model = types.SimpleNamespace(layer_configs=(jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),) * 3, dtype="bfloat16")
    for devices, joined in ((1, True), (2, "head"), (4, True)):
        told = ("--chip", "v6e", "--memory", "3MB", "--weights", "1MB", "--dtype", "bfloat16", "--block-size", 16)
        assert run(folder, *told, "--max-seq-len", 64, "--devices", devices, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["suggestion"]["join_kv"] == joined
        config = jaxkv.CacheConfig.from_model(model, **found["suggestion"])
        jaxkv.partition_specs(config, jax.sharding.AbstractMesh((devices,), ("model",)))
        assert list(config.group_blocks) == found["options"][0]["group_blocks"]


def test_layers_with_windows_have_their_own_blocks_on_many_devices_too(folder, capsys):
    local = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    (folder / "config.json").write_text(json.dumps(CONFIG | local))
    layers = tuple(jaxkv.LayerConfig(num_kv_heads=2, head_dim=16, window=window) for window in (None, 7, 7))
    model = types.SimpleNamespace(layer_configs=layers, dtype="bfloat16")
    for devices in ("2", "2x1x2", "2x2"):
        told = ("--memory", "1MB", "--block-size", 8, "--max-seqs", 4, "--dtype", "bfloat16", "--json")
        assert run(folder, *told, "--devices", devices) == 0
        found = json.loads(capsys.readouterr().out)
        config = jaxkv.CacheConfig.from_model(model, **found["suggestion"])
        assert list(config.group_blocks) == found["options"][0]["group_blocks"] and len(config.group_blocks) == 2


def test_a_chip_says_what_a_step_takes(folder, capsys):
    told = ("--chip", "v5e", "--max-seq-len", 64, "--max-seqs", 32, "--devices", "2x2x2", "--dtype", "bfloat16")
    assert run(folder, *told) == 0
    out = capsys.readouterr().out
    assert "16 GB, 14.9 GiB, of memory" in out and "head_dim_multiple=128" in out
    table = (
        out[out.index("a decode step") : out.index("A step takes each of 8 devices at least max(")].strip().splitlines()
    )
    assert [re.split("  +", line)[0] for line in table[1:]] == [
        "reads weights", "reads the cache", re.search("computes .* GFLOP", out)[0],
        "sends in 7 all-reduces over 2 (tensor)", "sends in 1 all-gather over 2 (tensor)",
        "sends in 3 all-gathers over 2 (context)",
    ]  # fmt: skip
    assert max(map(len, table)) <= 100 and all("ICI, 200 GB/s" in line for line in table[-3:])
    assert run(folder, *told, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["hosts"] == 2  # of four devices each, which have a part of the rows to themselves
    assert found["memory"]["total"] == 16 * 10**9 and found["chip"]["link"] == {"name": "ICI", "rate": 200e9}
    step = found["step"]
    assert step["sent_over"] == {"ICI": step["sent"]} and step["rows"] == 32
    assert step["tokens_per_second"] == pytest.approx(32 / step["seconds"]["step"])
    assert run(folder, *told, "--json", "--memory", "1GB", "--head-dim-multiple", 1) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["total"] == 10**9 and "head_dim_multiple" not in found["suggestion"]


def test_shapes_of_a_thousand_devices(folder, capsys):
    told = ("--chip", "h100", "--devices", 1024, "--shapes", "--max-seq-len", 64)
    assert run(folder, *told) == 0
    out = capsys.readouterr().out
    table = out[: out.index("\n\n")].splitlines()
    assert len(table) == 13 and max(map(len, table)) <= 100
    assert run(folder, *told, "--json") == 0
    shapes = json.loads(capsys.readouterr().out)["shapes"]
    rates = [shape["step"]["tokens_per_second"] for shape in shapes]
    assert rates == sorted(rates, reverse=True)
    # Heads are 4, and blocks have 16 tokens.
    assert {(x["tensor"], x["data"], x["context"]) for x in shapes} == {
        (t, 1024 // t // c, c) for t in (1, 2, 4) for c in (1, 2, 4, 8, 16)
    }
    assert run(folder, *told, "--max-seqs", 64, "--json") == 0  # over no more parts of the data than there are rows
    assert {shape["data"] for shape in json.loads(capsys.readouterr().out)["shapes"]} == {16, 32, 64}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--devices 8x0", "data in --devices must be at least 1, not 0"),
        ("--devices 0x2", "tensor in --devices must be at least 1, not 0"),
        ("--devices 1x-2", "data in --devices must be at least 1, not -2"),
        ("--devices 8xx4", "tensor x data x context, such as 8, 8x16 or 8x4x2, not '8xx4'"),
        ("--devices 2.5", "such as 8, 8x16 or 8x4x2, not '2.5'"),
        ("--devices 2x2x2x2", "such as 8, 8x16 or 8x4x2, not '2x2x2x2'"),
        (f"--devices {'9' * 200}", "such as 8, 8x16 or 8x4x2, not '999"),
        (f"--devices 2x{10**30}", "data in --devices must be at most 1048576, not 1000"),
        ("--devices 1024x1024x1024", "All devices of --devices together must be at most"),
        ("--devices 1x1x3", "Blocks of 256 tokens cannot be divided among the 3 devices"),
        ("--devices 1x1x4 --block-size 6", "Blocks of 6 tokens cannot be divided among the 4 devices"),
        ("--devices 1x4 --max-seqs 3", "The 3 rows of --max-seqs cannot be divided among 4 parts of the data: they"),
        ("--devices 1x4 --max-seqs 6", "cannot be divided among 4 parts of the data: 8 could be"),
        ("--devices 1x4 --max-seqs 0", "--max-seqs must be at least 1, not 0"),
        ("--block-size 16 --block-size 0", "--block-size must be at least 1, not 0"),
        ("--chip v5e --shapes --devices 4 --block-size 0", "--block-size must be at least 1, not 0"),
        ("--chip v9", "--chip must be one of v5e, v6e, tpu7x, h100, h200, b200, not 'v9'"),
        ("--shapes", "--shapes compares how long a decode step takes at least: say where with --chip"),
        ("--shapes --chip v5e --devices 2x2", "--shapes takes a number of --devices, 4, not one of its shapes, 2x2x1"),
        ("--shapes --chip v5e --devices 3 --max-seqs 2 --block-size 8 --block-size 7", "cannot be divided among"),
    ],
)  # fmt: skip
def test_devices_that_cannot_be(folder, capsys, arguments, says):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 4}))
    assert run(folder, "--memory", "3MB", *arguments.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("jaxkv: ") and says in err and err.count("\n") == 1 and not out


def test_neither_memory_nor_chip(folder, capsys):
    with pytest.raises(SystemExit):
        run(folder, "--max-seq-len", "0.05K")
    assert "is not a whole number" in capsys.readouterr().err
    told = ("--max-seqs", 6, "--max-seq-len", "1K", "--dtype", "float32", "--dtype", "int8")
    assert run(folder, *told, "--devices", "1x2", "--json") == 0
    needs = json.loads(capsys.readouterr().out)
    assert needs["devices"] == 2 and [asked["dtype"] for asked in needs["asked"]] == ["float32", "int8"]
    assert all(asked["rows"] == 6 and asked["length"] == 1024 for asked in needs["asked"])
    # As much as a device that has it can hold.
    room = needs["weights"] + needs["asked"][0]["bytes"]
    held = ("--memory", room, "--rest", 0, "--devices", "1x2", "--json")
    assert run(folder, *told, *held) == 0
    fits = [asked["fits"] for asked in json.loads(capsys.readouterr().out)["asked"]]
    assert fits == [True, True] and run(folder, *told, "--memory", room - 1, *held[2:]) == 0
    assert [asked["fits"] for asked in json.loads(capsys.readouterr().out)["asked"]] == [False, True]
    assert run(folder, "--mean-len", 9) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 row of 9 tokens needs ") and "Say how much memory a device has with --memory" in out


def test_windows_padding_and_what_does_not_fit(folder, capsys):
    local = CONFIG | {"model_type": "mistral", "sliding_window": 10, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(local))
    assert (
        run(
            folder,
            "--memory",
            "250kB",
            "--weights",
            "0",
            "--rest",
            "0",
            "--head-dim-multiple",
            128,
            "--dtype",
            "bfloat16",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "3 layers (3 with a window of 10)" in out and "3.0 KiB" in out
    assert re.search(r"^ +64  bfloat16  does not fit *$", out, re.MULTILINE)
    assert "head_dim_multiple=128" in out


def test_the_bar_and_the_guess(folder, capsys):
    assert run(folder, "--memory", "3MB", "--weights", "1MB", "--dtype", "bfloat16") == 0
    out = capsys.readouterr().out
    assert "[" + "█" * 20 + "▒" * 36 + "·" * 4 + "]" in out
    assert "█ weights 976.6 KiB, 33%   ▒ cache 1.7 MiB, 60%   · rest 195.3 KiB, 7%" in out
    assert "50 on the average (a guess: say it with --mean-len or --lengths)." in out


def test_a_file_of_lengths_and_json(folder, capsys):
    (folder / "lengths.txt").write_text("12\n7\n40, 33\n")
    (folder / "lengths.json").write_text("[12, 7, 40, 33]")
    reports = []
    for name in ("lengths.txt", "lengths.json"):
        assert run(folder, "--memory", "3MB", "--lengths", folder / name, "--json") == 0
        reports.append(json.loads(capsys.readouterr().out))
    report = reports[0]
    assert reports[1] == report and report["mean_len"] == 23 and report["max_seq_len"] == 40
    assert report["memory"]["rest"] == (3_000_000 - report["memory"]["weights"]) // 10
    assert (
        sum(report["memory"][part] for part in ("weights", "cache", "rest")) == report["memory"]["total"] == 3_000_000
    )
    option = next(o for o in report["options"] if o["block_size"] == 16 and "bfloat16" in o["dtypes"])
    assert option["fits"] and option["marginal_bytes_per_token"] == 384 and option["rows"] > option["full_rows"]
    model = types.SimpleNamespace(layer_configs=(jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),) * 3, dtype="float32")
    config = jaxkv.CacheConfig.from_model(model, **report["suggestion"])
    assert (config.max_seqs, config.bytes) == (option["rows"], option["bytes"])
    assert any(not o["fits"] for o in report["options"]) or report["options"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "is not a file: --lengths takes one"), ("", "but is empty"), ("12 3.5", "but has '3.5' in it"),
     ("-4", "but has '-4' in it"), ("1" * 99, "but has '1111"), ("0", "but go from 0 to 0")],
)  # fmt: skip
def test_a_file_that_has_no_lengths(folder, capsys, content, says):
    if content is not None:
        (folder / "lengths").write_text(content)
    assert run(folder, "--memory", "3MB", "--max-seq-len", 64, "--lengths", folder / "lengths") == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxkv: ") and says in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        ({}, ["--memory", "1kB"], "1000 B of memory do not hold 212.9 KiB of weights"),
        ({}, ["--memory", "1kB", "--weights", "0"], "900 B for the cache are too little"),
        ({}, ["--memory", "1MB", "--rest", "1MB"], "of weights (108,992 parameters of bfloat16) and 976.6 KiB of rest"),
        ({}, ["--memory", "1MB", "--max-seq-len", "0"], "--max-seq-len must be at least 1"),
        ({}, ["--memory", "1MB", "--mean-len", "500"], "--mean-len must be at most --max-seq-len = "),
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
