"""The TPU kernels through the real compiler, with no TPU: it accepts them, and no pool is ever copied."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from nightly import NIGHTLY, skip_by_day

from pallas_kernels.tpu.pages import SPILL_BYTES

SUPPORT = pathlib.Path(__file__).parents[1] / "support"
SITE = os.environ.get("JAXKV_COMPILE_SITE")
pytestmark = [
    pytest.mark.skipif(not SITE, reason="JAXKV_COMPILE_SITE does not say where libtpu is (the Makefile does)"),
    pytest.mark.timeout(280, method="thread"),
]


# What is compiled by day, in one process, each script behind the others.
BY_DAY = {
    ("tpu_programs.py", "four"),
    ("tpu_choice.py",),
    ("tpu_state_programs.py", "four", "qwen3-next", "qwen3-next-conv"),
}


@functools.cache
def compile_by_day():
    """Returns what each script of `BY_DAY` says."""
    jobs = sorted(BY_DAY)
    text = "\n".join(compile_for(json.dumps(jobs), script="run_scripts.py", parse=str))
    return dict(
        zip(jobs, [[json.loads(line) for line in part.splitlines()] for part in text.split("END\n")], strict=True)
    )


@functools.cache
def compile_for(*options, script="tpu_programs.py", timeout=270, parse=json.loads):
    if not NIGHTLY and (script, *options) in BY_DAY:
        return compile_by_day()[script, *options]
    path = os.pathsep.join([str(SUPPORT.parents[1]), SITE])
    done = subprocess.run(
        [sys.executable, SUPPORT / script, *options], env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [parse(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x", "four"] if NIGHTLY else ["v6e", "four"])
@pytest.mark.timeout(1800, method="thread")
def test_nothing_is_copied(chip):
    programs = compile_for(chip, *(["everything"] if NIGHTLY else []), timeout=1700)
    assert programs
    for program in programs:
        assert program["kernels"] >= 1, program
        # A write may lay its tokens out anew; what attends its queries and outputs, where vector memory is small.
        scratch = 0.01 * program["pool"] + 2.1 * program["queries"]
        if program["op"] == "write_kv":  # v5p lays a latent token's one head out in four lines
            scratch = (3 if "latent" in program["name"] else 2) * program["new"] + 2**20
        scratch += 2 * program["brought"]  # of chosen tokens
        assert program["temp"] < scratch, program
        assert not program["made as large"], program
        assert program["alias"] == (0 if program["op"] == "paged_attention" else program["pool"]), program
        assert program["collectives"] == 0, program
        assert not program["tokens in vector memory"], program  # from there they are copied register by register
        # All of a pool would come and go in every layer. A v5e has no SparseCores: it gathers what fits from there.
        assert not program["pools in vector memory"] or (chip == "v5e" and program["brought"]), program
        check_memory(program["vector memory"])
    assert sum(len(program["vector memory"]) for program in programs) >= (0 if chip == "four" else 8)
    scratch = {program["name"]: program["temp"] for program in programs if program["op"] == "write_kv"}
    if scratch:  # it is the tokens' alone: a pool four times larger takes no more
        assert scratch["write of many tokens"] < scratch["write of many tokens, small pool"] + 2**18, scratch


def test_a_chip_that_is_not_there_chooses_the_kernels():
    """By the devices that shapes lie on, or by the mesh that is set; the process's own platform is the CPU."""
    for kernels, explained in compile_for(script="tpu_choice.py"):
        assert kernels >= 1 and explained == "tpu"


def check_memory(kernels):
    for kernel in kernels:
        assert kernel["used"] <= kernel["model"] <= kernel["limit"], kernel
        needed = kernel["model"] - SPILL_BYTES  # the ring of writes only grows until it is long enough
        assert kernel["kernel"] == "write" or needed < 2**23 or kernel["used"] > needed / 4, kernel


@pytest.mark.parametrize(
    "programs",
    [
        ("four", "qwen3-next", "qwen3-next-conv"),
        *[("four", "kimi-linear:256:4")] * NIGHTLY,
        *[(chip,) for chip in ("v5e", "v5p", "v6e", "tpu7x")] * NIGHTLY,
        *[(chip, "small:256", "falcon-h1:256") for chip in ("v5e", "v5p", "v6e", "tpu7x")] * NIGHTLY,
        *[(chip, "small-channels:256", "kimi-linear:256:4") for chip in ("v5e", "v5p", "v6e", "tpu7x")] * NIGHTLY,
    ],
)
@pytest.mark.timeout(1100, method="thread")
def test_states_stay_where_they_lie(programs):
    """A kernel a layer, chosen by the platform, of many tokens two; no pool is copied or moved, over four chips' heads
    neither."""
    for program in compile_for(*programs, script="tpu_state_programs.py", timeout=1000):
        assert program["kernels"] == (4 if program["tokens"] else 2), program
        assert program["alias"] == program["pool"], program
        # Of many tokens a state space's inputs times dt, with a line of 128 numbers for each 64: 18 MB of Falcon-H1.
        limit = (2**25, program["pool"] / 3) if program["tokens"] else (2**23, program["pool"] / 4)
        assert program["temp"] < min(limit), program
        assert not program["pool copies"] and not program["in vector memory"] and not program["collectives"], program
        for kernel, used in program["used"].items():
            assert used <= program["model"][kernel] <= program["limit"], program
        assert len(program["used"]) == (2 if program["tokens"] else 1), program


@pytest.mark.skipif(not NIGHTLY, reason="the compiler takes long over shapes at the edge of what there is")
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.timeout(3100, method="thread")
def test_the_model_of_memory(chip):
    """No shape ends in a compiler error where the implementation is left open, and no kernel takes more than was
    thought, nor, where it is large, far less. 320 shapes on four chips."""
    lines = compile_for(chip, "80", script="tpu_memory.py", timeout=3000)
    assert {line["chosen"] for line in lines} == {"tpu", "xla"}
    for line in lines:
        assert line["kernels"] or line["chosen"] == "xla", line
        check_memory(line["kernels"])


@pytest.mark.skipif(not NIGHTLY, reason="what its kernels are given is tried by day, in the interpreter")
@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_a_decode_step_with_residual_layers(chip):
    """Two kernels a layer: four bits are written, and read up to the newest tokens; these are written and read."""
    for program in compile_for(chip, "2", "residual", script="tpu_model.py"):
        assert program["kernels"] == 2 * program["layers"], program
        assert program["temp"] < 0.01 * program["pools"] + 1.1 * program["logits"], program
        assert not program["large copies"], program
        assert program["alias"] >= program["cache"] - program["unread"], program


LAID_OUT_ANEW = "XLA turns all weights of a scan in every step on tpu7x, those of a plain scan over two products too"


@pytest.mark.parametrize(
    ("chip", "scan"),
    [
        *((chip, scan) for chip in ("v5e", "v5p", "v6e") for scan in (False, True)),
        ("tpu7x", False),
        pytest.param("tpu7x", True, marks=pytest.mark.xfail(strict=True, reason=LAID_OUT_ANEW)),
    ]
    if NIGHTLY
    else [("v6e", True)],
)
def test_a_whole_decode_step_of_a_real_model(chip, scan):
    """Layers and `extend`: one fused kernel a layer, the cache updated in place, next to no scratch memory.

    Scanned layers are one kernel in all.
    """
    programs = compile_for(chip, *["scan"] * scan, script="tpu_model.py")
    assert len(programs) == 2
    for program in programs:
        assert program["kernels"] == (1 if scan else program["layers"]), program
        # On a v5e XLA has logits twice, by the look of it; a layer's pool is 0.03 of all and more.
        assert program["temp"] < 0.01 * program["pools"] + (2 * program["logits"] if chip == "v5e" else 0), program
        assert not program["large copies"], program  # a weight laid out for something else is turned in every step
        # In bytes (small arrays are padded) and in arrays: all but two that `extend` replaces without reading them.
        assert program["alias"] >= program["cache"] - program["unread"], program
        assert program["aliased arrays"] == program["arrays"] - 2, program


@pytest.mark.skipif(not NIGHTLY, reason="twelve programs to compile")
def test_a_cache_over_four_chips():
    """Kernels run on each chip's heads; nothing is gathered or copied, however large the pools are, of layers that keep
    bounds or evict by heads neither."""
    programs = compile_for(script="tpu_devices.py")
    assert len(programs) == 12
    for program in programs:
        divided = program["context"] is not None  # a layer writes, reads and brings together what was found
        assert program["kernels"] == (4 if divided else 2), program
        assert program["collectives"] == (["all-gather"] * 2 if divided else []), program
        assert program["alias"] >= program["pool"], program
        if program["plain"]:
            assert program["temp"] == programs[0]["temp"] < 2**20, program
        assert program["temp"] < 2**21, program


@skip_by_day("five programs to compile")
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("tpu_programs.py", ("decode 8 x 1024", "0", "1")),
        ("tpu_programs.py", ("prefill of 1,024 tokens", "0", "1")),
        ("tpu_states.py", ("Qwen3-Next", "0", "kernel")),
        ("tpu_state_chunks.py", ("128", "bfloat16", "Qwen3-Next")),
        ("tpu_state_chunks.py", ("128", "bfloat16", "Kimi Linear")),
    ],
)
def test_what_the_cycle_model_is_asked_about_compiles(script, options):
    """The benchmarks stand in for the kernels' arguments in scalar memory: they know what those are."""
    compile_for("v6e", *options, script=SUPPORT.parents[1] / "benchmarks" / script, parse=str)
