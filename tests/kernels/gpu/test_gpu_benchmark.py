"""`benchmarks/gpu.py` and `gpu_generate.py`, as far as they come without a chip: a lent one is not there for finding
their mistakes.

Their --dry-run does a little of everything.
"""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys

import gpu
import gpu_book
import gpu_contenders
import gpu_engines
import gpu_generate
import gpu_models
import gpu_profile
import gpu_states
import gpu_work
import jax
import numpy as np
import pytest
import serving_order
from nightly import NIGHTLY, skip_by_day

from pallas_kernels import testing

pytestmark = [
    pytest.mark.skipif(jax.default_backend() == "gpu", reason="there it can be run itself"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # JAX's Triton kernel
]

RAGGED = next(nth for nth, (_, point, _) in enumerate(gpu_work.headlines()) if point.ragged)  # Triton's table is padded


def test_work():
    """No piece twice, none too large, and what a chip is asked first among the first."""
    pieces = [*gpu_work.headlines(), *gpu_work.others()]
    assert len(set(pieces)) == len(pieces)
    assert all(point.kv_bytes <= gpu_work.MAX_BYTES for _, point, _ in pieces)
    early = [point for _, point, _ in pieces[:20]]
    assert {(p.batch, p.context) for p in early if p.what == "decode"} >= {(64, 8192), (1, 131_072), (256, 512)}
    assert {p.kind for p in early} == {None, "int8", "float8_e4m3fn", "int4"}
    assert {p.what for p in early} > {"mixed", "prefill"}
    assert {p.block for p in early[:2]} == {16, 64}


def test_steps_of_states(interpret):
    """What is checked and measured on a chip runs, and both that compute compute the same."""
    gpu_states.check_states(0, interpret)
    for nth in range(len(gpu_states.CHUNKED)):
        gpu_states.check_chunks(nth, interpret)
    tiny = gpu_states.Shape(heads=1, groups=1, keys=8, values=64)
    found = {name: prepare().run() for name, prepare in gpu_states.steps_of(tiny, (1, 1), interpret)}
    ours, xla = (jax.tree.map(lambda x: np.asarray(x, np.float32), found[name]) for name in ("ours", "xla"))
    np.testing.assert_allclose(ours[1], xla[1], rtol=0.02, atol=0.02)
    np.testing.assert_allclose(ours[0], xla[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*gpu_profile.POINTS, *gpu_profile.STATES] if NIGHTLY else ["latent", "qwen3-next"])
def test_profiled_kernels_lower(name):
    arrays = jax.eval_shape(lambda: gpu_profile.make_arrays(name))
    lowered = jax.jit(gpu_profile.find_call(name)).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("nth", range(len(gpu_work.headlines())) if NIGHTLY else (RAGGED,))
def test_contenders_lower(nth):
    """Everyone's call of true size, but for PyTorch's and FlashInfer's."""
    _, point, who = gpu_work.headlines()[nth]
    said = gpu_contenders.lowered(point, who)
    refused = {name for name, result in said.items() if result != "lowers"}
    assert refused <= ({"cudnn", "cudnn-paged"} if point.head_dim > 128 else set()), said  # JAX asks the GPU at hand
    assert said.keys() >= (
        {0: {"ours", "triton", "cudnn", "cudnn-paged"}, RAGGED: {"ours", "triton"}}.get(nth, {"ours"})
    )


def test_contenders_compute_the_same(monkeypatch):
    """Those that run on a CPU: XLA's path, and dense attention on the rows in their tables' order."""
    point = gpu_work.Point((4, 2), 3, 40, 8)

    def dense(q, kv):
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q, *kv, implementation="xla")

    monkeypatch.setattr(gpu_contenders, "by_cudnn", dense)
    monkeypatch.setattr(
        gpu_contenders, "ours", lambda *_: functools.partial(testing.run, gpu_contenders.xla.paged_attention)
    )
    runs = dict(gpu_contenders.contenders(point, "all", interpret=object()))
    names = ("ours", "cudnn", "xla", "xla, steps of a CPU")
    wanted, *outs = (np.asarray(runs[name]().once(), np.float32) for name in names)
    for out in outs:
        np.testing.assert_allclose(out, wanted, atol=0.02)


def test_a_run_goes_on_behind_what_ended_its_process(tmp_path):
    """The first worker hangs, the second's device breaks, the third dies; each goes on behind the last."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, pathlib, sys, time
sys.path.append({str(pathlib.Path(gpu_book.__file__).parent)!r})
import gpu
import gpu_book
if "--worker" not in sys.argv:
    sys.exit(gpu_book.run_worker([], time.time() + 100))
nth = int(sys.argv[sys.argv.index("--worker") + 1])
book = gpu_book.Book(pathlib.Path({str(tmp_path / "book.json")!r}), go_on=nth > 0, only="what=")

def fails():
    raise ValueError("no")

def breaks():
    gpu_book.device_answers = lambda: False
    raise ValueError("an illegal memory access")

book.attempt({{"what": "fine"}}, lambda: {{"seconds": 1.0}}, 60)
book.attempt({{"what": "refused", "shape": (1, 2)}}, fails, 60)
book.attempt({{"what": "hangs"}}, lambda: time.sleep(60), 0.1)
book.attempt({{"what": "breaks"}}, breaks, 60)
book.attempt({{"what": "dies"}}, lambda: os.abort(), 60)
book.attempt({{"what": "last"}}, lambda: {{"seconds": float(nth)}}, 60)
"""
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = {row["what"]: row for row in json.loads((tmp_path / "book.json").read_text())["rows"]}
    assert list(rows) == ["fine", "refused", "hangs", "breaks", "dies", "last"]
    assert rows["fine"] == {"what": "fine", "seconds": 1.0}
    assert rows["refused"]["error"] == "ValueError('no')" and rows["refused"]["shape"] == [1, 2]
    assert rows["hangs"]["error"] == rows["dies"]["error"] == gpu_book.TRYING
    assert rows["breaks"]["broken"] and rows["last"]["seconds"] == 3.0
    assert "HUNG for 0 s: what=hangs" in run.stdout


def test_rows_are_measured_in_the_order_of_what_is_asked_for():
    states = {"what": "states", "kind": "qwen3-next", "by": "xla"}
    pieces = [(row, None) for row in ({"what": "decode", "kind": "int8"}, states, {"what": "prefill"})]
    only = ["prefill.*ours", "kind=int"]
    assert [row["what"] for row, _ in gpu.sort_pieces(pieces, only)] == ["prefill", "decode", "states"]
    assert gpu.sort_pieces(pieces, []) == pieces
    rows = [f"{row} by=ours" for row in ("prefill", "kind=int8", "states")]
    assert [re.search(gpu.match_any(only), row) is not None for row in rows] == [True, True, False]
    assert re.search(gpu.match_any([]), "anything")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Next(serving_order.Next):
    vocab_size = 97


@pytest.mark.parametrize("rows", (1, 8, 64, 256) if NIGHTLY else (1, 8))
def test_an_engine_compiles_two_programs(rows):
    """Most of the time on a chip would go into others: prompts of true length take steps of one size."""
    runs = gpu_engines.Runs(Next(), rows, gpu_engines.Sizes(dry=False))
    tokens, seconds, waits = runs.run()
    if rows == 8:
        runs.engine.submit(runs.long, 2).result()
    assert len(runs.engine._runner._shapes) == 2 and runs.engine.stats()["preemptions"] == 0
    assert {len(row) for row in tokens} == {128} and len(seconds) == len(waits) > 100


@pytest.mark.parametrize("name", gpu_models.MODELS)
def test_steps_of_models_lower(name):
    """Two layers of each, with kernels in them by default."""
    config = gpu_models.MODELS[name]
    config = dataclasses.replace(config, layers=config.layers[:2], ropes=config.ropes[:2])
    for rows, tokens in ((8, None), (8, 2112)):
        assert gpu_models.lowered(config, rows, tokens, 4096)["kernels"] >= 2 * len(config.layers)


def test_compared_tokens():
    found = gpu_generate.compare_tokens([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 0, 4], [0, 6, 7, 8]])
    assert found == {"equal": 0.75, "equal_until_first": 1.0, "rows_equal_in_2_tokens": 1}


@skip_by_day("its parts")
@pytest.mark.timeout(600)
def test_generation_runs_dry():
    run = subprocess.run(
        [sys.executable, gpu_generate.__file__, "--dry-run", "--only", "smol"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "what=generate" in run.stdout and "what=lowers model=smollm2-135m rows=64" in run.stdout
