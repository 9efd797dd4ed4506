"""What `plan` answers first: what was asked, beside weights as they are loaded, in no time."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
import types

import jax
import pytest
from flax import nnx
from support.fixtures import DATA

import jaxkv
from jaxkv import models
from jaxkv._cli.main import main
from jaxkv._cli.plan.capacity import plan
from jaxkv._cli.plan.chips import KERNEL_BLOCKS, QUANTIZED, chip_named, reads
from jaxkv._cli.plan.command import _kinds
from jaxkv._core.config.byte_sizes import ByteSizes
from pallas_kernels.api.backends import find_backend
from pallas_kernels.common.quantization import FORMATS

GLOBAL = jaxkv.LayerConfig(num_kv_heads=2, head_dim=24)
LOCAL = jaxkv.LayerConfig(num_kv_heads=2, head_dim=24, window=9)
SINKS = jaxkv.LayerConfig(num_kv_heads=3, head_dim=8, sink_tokens=9, window=20)
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 100,
    "torch_dtype": "float16",
}  # fmt: skip


def run(folder, *arguments):
    return main(["plan", "--model", str(folder), *map(str, arguments)])


def test_weights_are_what_load_makes_of_them(tmp_path, capsys):
    folder = tmp_path
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = models.loader.read_config(folder)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    for dtype in ("float16", "float32"):  # what the config says, then what the file has
        assert run(folder, "--memory", "3MB") == 0
        assert f"({count:,} parameters of {dtype})" in capsys.readouterr().out
        models.save(model, folder)
    shutil.copy(DATA / "gpt_oss" / "config.json", folder)
    shutil.copy(DATA / "gpt_oss" / "model.safetensors", folder)
    assert run(folder, "--memory", "3MB", "--json") == 0
    loaded = sum(x.nbytes for x in jax.tree.leaves(models.load(DATA / "gpt_oss")))
    assert json.loads(capsys.readouterr().out)["memory"]["weights"] == loaded  # MXFP4 becomes numbers


def published(name, tmp_path, **change):
    config = json.loads((DATA / "published.json").read_text())[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    return tmp_path


def test_the_first_line_answers_what_was_asked(tmp_path, capsys):
    told = ("--chip", "h100", "--max-seqs", 100, "--max-seq-len", 8192)
    assert run(published("llama-3.1-8b", tmp_path), *told) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "100 rows of 8,192 tokens need 100.0 GiB in bfloat16, 51.6 GiB in int8, 28.1 GiB in int4, 26.6 GiB in "
        "k5v3; beside 15.0 GiB of weights an h100 has 53.6 GiB: int8 fits.\n"
    )
    # What is suggested holds what it says.
    call = re.search(r"(jaxkv.CacheConfig.from_model\(model, .*\))", out)[1]
    layers = (jaxkv.LayerConfig(num_kv_heads=8, head_dim=128),) * 32
    model = types.SimpleNamespace(layer_configs=layers, dtype="bfloat16")
    config = eval(call, {"jaxkv": jaxkv, "model": model})
    assert config.dtype == "int8" and config.num_blocks * config.block_size >= 100 * 8192 and config.max_seqs == 100
    assert config.bytes <= 53.6 * 2**30
    # It says when rows need less, and what to leave out then.
    assert out.endswith("Without memory_bytes= it takes the 51.6 GiB that 100 rows need: more keeps prefixes alone.\n")
    least = config.from_model(model, max_seqs=100, max_seq_len=8192, block_size=config.block_size, dtype="int8").bytes
    assert round(least / 2**30, 1) == 51.6
    assert run(tmp_path, *told[:2], "--max-seqs", 1000, "--max-seq-len", 8192) == 0
    out = capsys.readouterr().out
    rows = int(re.search(r"none fits\. In bfloat16 (\d+) rows of 2,048 tokens do\.", out)[1])
    assert f"max_seqs={rows}, " in out and "Without memory_bytes=" not in out
    assert run(tmp_path, *told[:2]) == 0
    out = capsys.readouterr().out
    assert re.search(r": it holds 213 in .*, \d+ in int8, \d+ in int4, \d+ in k5v3 rows", out)
    assert "Without memory_bytes=" not in out
    assert run(tmp_path, "--memory", "80GB") == 0
    assert re.match(
        r"Beside 15\.0 GiB of weights a device has 53\.6 GiB: it holds 213 in bfloat16, ", capsys.readouterr().out
    )


def test_what_is_suggested_for_residual_layers(tmp_path, capsys):
    """The call makes the cache that was counted: with residual layers where a quantized one is the best."""
    sizes = ("--memory", "80GB", "--block-size", 16, "--max-seq-len", 8192)
    folder = published("llama-3.1-8b", tmp_path)
    model = types.SimpleNamespace(
        layer_configs=(jaxkv.LayerConfig(num_kv_heads=8, head_dim=128),) * 32, dtype="bfloat16"
    )
    for dtype, length in (("int4", 32), ("bfloat16", None)):
        told = sizes if length is None else (*sizes, "--residual-length", length)
        assert run(folder, *told, "--dtype", dtype, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        config = jaxkv.CacheConfig.from_model(model, **report["suggestion"])
        assert config.residual_length == length
        assert list(config.group_blocks) == report["options"][0]["group_blocks"]
        assert run(folder, *told, "--dtype", dtype) == 0
        out = capsys.readouterr().out
        call = re.search(r"(jaxkv.CacheConfig.from_model\(model, .*\))", out)[1]
        assert eval(call, {"jaxkv": jaxkv, "model": model}) == config
        assert ("keep all tokens + the newest 32 tokens (residual_length). tokens:" in out) == (length is not None)


def test_a_suggestion_is_no_longer_than_a_row_can_get(tmp_path, capsys):
    told = ("--memory", "80GB", "--dtype", "bfloat16", "--block-size", 16)
    assert run(published("gemma-3-27b-it-tf4.56", tmp_path), *told, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    option = report["options"][0]
    assert option["full_rows"] == 0 and report["suggestion"]["max_seq_len"] == option["tokens"] < report["max_seq_len"]
    assert run(tmp_path, *told) == 0
    out = capsys.readouterr().out
    assert "blocks: in layers that keep a window of 1024 tokens + all tokens. tokens: in those that keep most." in out


def test_formats_that_differ_in_their_scales_are_not_listed_as_one(monkeypatch):
    finer = dataclasses.replace(FORMATS["int4"], name="finer", group_size=16)
    monkeypatch.setitem(FORMATS, "finer", finer)
    of_heads = {
        n: types.SimpleNamespace(layer_configs=[jaxkv.LayerConfig(num_kv_heads=2, head_dim=n)]) for n in (32, 64)
    }
    kinds = _kinds(None, of_heads[64], None)
    assert ["int4"] in kinds and ["k5v3"] in kinds and ["finer"] in kinds
    assert ["int8", "float8_e4m3fn", "float8_e5m2"] in kinds and ["bfloat16", "float16"] in kinds
    assert _kinds(["int4", "k5v3"], of_heads[32], None) == [["int4"], ["k5v3"]]
    latent = types.SimpleNamespace(layer_configs=[jaxkv.LayerConfig.latent(rank=64, rope_dim=64)])
    kinds = _kinds(None, latent, None)
    assert ["int4"] in kinds and ["k5v3"] not in kinds  # which cannot store it


def test_of_formats_that_take_the_same_the_one_that_loses_less_is_listed():
    """With heads of 32 int4 and k5v3 have a scale for each; a TPU's kernels read the one alone."""
    model = types.SimpleNamespace(layer_configs=[jaxkv.LayerConfig(num_kv_heads=2, head_dim=32)])
    for chip, named, other in ((None, "k5v3", "int4"), ("h100", "k5v3", "int4"), ("v5e", "int4", "k5v3")):
        kinds = _kinds(None, model, chip and chip_named(chip))
        assert [named] in kinds and [other] not in kinds, chip
    assert [kind for kind in kinds if len(kind) == 3] == [["int8", "float8_e4m3fn", "float8_e5m2"]]


def test_what_no_kernel_reads_is_marked(tmp_path, capsys):
    folder = published("llama-3.2-3b", tmp_path)
    assert run(folder, "--memory", "30GB", "--json") == 0
    assert all(option["has_kernel"] for option in json.loads(capsys.readouterr().out)["options"])
    assert run(folder, "--chip", "h100") == 0
    out = capsys.readouterr().out
    assert "* no kernel for an h100 reads it" in out
    assert run(folder, "--chip", "v5e") == 0 and re.search(r"^ *128  int4 ", capsys.readouterr().out, re.M)
    assert run(published("deepseek-v3", tmp_path), "--chip", "tpu7x", "--devices", "128") in (0, 1)
    assert re.search(
        r"^ *128  int4\*", capsys.readouterr().out, re.M
    )  # nothing shares a byte with a latent row's number
    assert "bfloat16*" not in out and "float32*" in out
    # Blocks of 8 and 16 tokens are fewer than the scales that the kernels take at once.
    assert re.findall(r"^ *(\d+)  int8\*", out, re.M) == ["8", "16"] and re.search(r"^ *32  int8,", out, re.M)


def test_what_the_kernels_do_not_read_is_marked_where_it_was_asked_for(tmp_path, capsys):
    told = ("--chip", "h200", "--dtype", "int8")
    assert run(published("deepseek-v2-lite", tmp_path), *told) == 0
    assert "in int8 (by XLA only) rows" in capsys.readouterr().out  # of latent rows
    assert run(published("llama-3.2-3b", tmp_path), *told, "--block-size", "16") == 0
    assert "in int8 (by XLA only) rows" in capsys.readouterr().out
    assert run(tmp_path, *told) == 0 and "by XLA" not in capsys.readouterr().out
    assert run(tmp_path, *told, "--json") == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert [option["block_size"] for option in options if not option["has_kernel"]] == [8, 16]


def test_quantised_folders_are_planned(tmp_path, capsys):
    assert run(published("qwen3-32b-fp8-static-modelopt", tmp_path), "--memory", "80GB") == 0
    says = "32,762,123,264 parameters of bfloat16; the folder has them as FP8, which load does not read"
    assert says in capsys.readouterr().out
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert run(published("llama-3.2-3b", tmp_path), "--memory", "80GB") == 0
    assert "the folder has them as NVFP4" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "kind"), [("gpt-oss-120b", "mxfp4"), ("qwen3-32b-fp8", "fp8"), ("qwen3-32b", "")])
def test_what_load_dequantizes_is_said(tmp_path, capsys, name, kind):
    """The files are a quarter or a half of what the weights take."""
    assert run(published(name, tmp_path)) == 0
    says = f"parameters of bfloat16; the folder has them as {kind}, which load dequantizes)"
    assert (says if kind else "parameters of bfloat16)") in capsys.readouterr().out


def test_a_config_file_is_enough(tmp_path, capsys):
    """By whatever name."""
    folder = published("llama-3.2-3b", tmp_path)
    assert run(folder, "--memory", "30GB") == 0
    wanted = capsys.readouterr().out
    file = (folder / "config.json").rename(folder / "llama.json")
    assert run(file, "--memory", "30GB") == 0 and capsys.readouterr().out == wanted
    assert run(file.rename(folder / "llama.txt")) == 2 and "llama.txt is a file: " in capsys.readouterr().err


def test_planning_takes_no_time(tmp_path, capsys):
    """It took 12 to 37 s of CPU, over 24 options that differ in little."""
    run(published("gemma-3-27b-it-tf4.56", tmp_path), "--memory", "80GB")
    start = time.process_time()
    assert run(published("deepseek-v3", tmp_path), "--memory", "2TB") == 0
    assert time.process_time() - start < 2 and capsys.readouterr().out


def test_equal_layers_are_measured_once(tmp_path, capsys, monkeypatch):
    """Of 126 equal layers each was asked 99 times how large its blocks are, a second of CPU."""
    asked, measure = [], ByteSizes.bytes_per_layer_block
    monkeypatch.setattr(ByteSizes, "bytes_per_layer_block", lambda self, i: asked.append(i) or measure(self, i))
    assert run(published("llama-3.1-405b", tmp_path), "--memory", "2TB") == 0
    assert len(asked) < 500 and capsys.readouterr().out


@pytest.mark.parametrize("layers", [(LOCAL, GLOBAL, LOCAL), (GLOBAL,) * 3, (LOCAL,) * 2, (SINKS, GLOBAL)])
@pytest.mark.parametrize(
    "fields", [{}, {"dtype": "int4", "block_size": 8}, {"join_kv": True, "head_dim_multiple": 128}]
)
def test_the_same_blocks_as_with_memory(layers, fields):
    for memory in (10**5, 123_456, 10**7):
        found = plan(layers, memory, max_seq_len=100, step_tokens=8, max_seqs=5, **fields)
        sizes = jaxkv.CacheConfig(layers=layers, max_seqs=5, max_seq_len=100, num_blocks=1, **fields)
        assert found.config.group_blocks == sizes.with_memory(memory, step_tokens=8).group_blocks


def test_the_formats_that_kernels_read_are_the_kernels_own():
    for platform in KERNEL_BLOCKS:
        assert set(QUANTIZED) == set(find_backend(platform).FORMATS)


@pytest.mark.parametrize("layer", [GLOBAL, jaxkv.LayerConfig.latent(512, 64)], ids=["heads", "latent"])
@pytest.mark.parametrize(("platform", "multiple"), [("gpu", 64), ("tpu", 128)])
def test_the_blocks_that_kernels_read_are_the_kernels_own(platform, multiple, layer):
    """Of every format, in blocks of every size, as a cache for that platform stores them."""
    layer = dataclasses.replace(layer, head_dim=128) if layer.rank is None else layer
    for name in FORMATS:
        if FORMATS[name].mixes_pairs and layer.rank is not None:  # no cache stores them so
            assert not reads(platform, layer, name)
            continue
        compute = "bfloat16" if FORMATS[name].is_quantized else name
        q = jax.ShapeDtypeStruct((4, 1, 32, layer.head_dim), compute)
        for block_size in (8, 16, 32, 64, 128):
            sizes = dict(max_seqs=4, max_seq_len=1024, num_blocks=64, block_size=block_size, dtype=name)
            config = jaxkv.CacheConfig(
                layers=(layer,), **sizes, head_dim_multiple=multiple, join_kv=layer.rank is None and platform == "tpu"
            )
            cache = jax.eval_shape(lambda config=config: jaxkv.init(config))
            choice = jaxkv.explain(q, cache, platform=platform)
            assert (choice.implementation == platform) == reads(platform, layer, name, block_size), (name, choice)


def test_a_plan_imports_no_kernel_compiler(tmp_path):
    """They take longer than all the rest of a plan."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    script = (
        "import sys\nfrom jaxkv._cli.main import main\n"
        f"assert main(['plan', '--model', {str(tmp_path)!r}, '--chip', 'h100']) == 0\n"
        "heavy = 'flax', 'optax', 'jax.experimental.mosaic', 'pallas_kernels.gpu', 'pallas_kernels.tpu'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
