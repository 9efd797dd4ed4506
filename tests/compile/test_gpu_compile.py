"""What the compiler makes of the GPU kernels for an H200: registers, memory, instructions, and the pools' fate.

Needs the extra `compile` in the folder that JAXKV_COMPILE_SITE names, and no GPU. The compiler has its own process.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from nightly import NIGHTLY, skip_by_day

import pallas_kernels

SITE = os.environ.get("JAXKV_COMPILE_SITE")
pytestmark = [
    pytest.mark.skipif(not SITE, reason="JAXKV_COMPILE_SITE does not name a folder with the extra `compile`"),
    pytest.mark.timeout(1800),  # the first test waits for the compiler
]

# Name -> the most registers and bytes of shared memory, so that two thread blocks of 256 threads share a multiprocessor
# (65,536 registers, 227 KiB); head_dim 256, and 32 query heads for a KV head, have one to themselves.
DECODE_BUDGETS = {
    "step": (96, 113_000),
}
if NIGHTLY:
    DECODE_BUDGETS |= {
        "llama3-8b": (96, 113_000),
        "one-kv-head": (152, 227_000),
        "llama2-7b": (96, 113_000),
        "llama3.2-1b": (96, 113_000),
        "phi2": (96, 113_000),
        "gemma2-2b-4-tokens": (152, 227_000),
        "llama3-8b-contiguous": (96, 113_000),
        "qwen2.5-14b": (96, 113_000),
        "gemma2-2b": (128, 227_000),
        "two-kv-heads": (128, 113_000),
        "llama3-8b-4-tokens": (128, 113_000),
        "llama3-8b-8-tokens": (168, 227_000),
        "llama3-8b-tree": (168, 227_000),
        "llama3-8b-deterministic": (96, 113_000),
        "gemma2-2b-first": (128, 227_000),
        "gemma2-2b-first-4-tokens": (152, 227_000),
        "llama3-8b-chunk": (96, 113_000),
        "llama3-8b-chunk-4-tokens": (128, 113_000),
        "48-heads": (128, 113_000),
        "64-heads": (152, 227_000),
        "512-16": (168, 227_000),
        "512-32": (255, 227_000),
        "512-4-tokens": (255, 227_000),
    }
OPTIONS = ("plain", "window", "soft-cap", "first", "all") if NIGHTLY else ("all",)
# One thread block fills a multiprocessor: 384 threads start with 168 registers each, and the producer hands most of its
# own to the consumers. At head_dim 256 an accumulator takes 128 of 232, and at 512 that of a half of the columns.
PREFILL = [
    *(("llama3-8b-prefill",) if NIGHTLY else ()),  # the plain one of a model's step
    *(("gemma2-2b-prefill", "llama3.2-1b-prefill", "qwen2.5-14b-prefill", "phi2-prefill") if NIGHTLY else ()),
    *(("llama3-8b-chunk-prefill", "llama3-8b-tree-prefill", "256-tree", "gemma2-2b-first-tree") if NIGHTLY else ()),
    *(["llama3-8b-deterministic-prefill"] if NIGHTLY else []),
    *(("48-heads-prefill", "71-heads-prefill", "48-heads-tree") if NIGHTLY else ()),
    *(("512-packed", "512-tree", "320-prefill") if NIGHTLY else ()),
    *(f"{head_dim}-{what}" for head_dim in ((64, 96, 128, 256, 512) if NIGHTLY else (256,)) for what in OPTIONS),
]


# Other forms of prefill that a plan may choose; see benchmarks/gpu_plans.py.
FORMS = [
    f"{name}: {form}"
    for name in ("llama3-8b-prefill", "64-all", "96-all", "128-all", "256-all", "llama3-8b-tree-prefill")
    for form in ("registers", "turns", "registers, turns", "ahead", "turns, ahead", "registers, turns, ahead")
] * NIGHTLY

# Where the items' contexts are cut, so that the chip has work.
CUT = {"gemma2-2b-first-tree", *(f"{head_dim}-{what}" for head_dim in (64, 96, 128) for what in ("plain", "soft-cap"))}

# Both kernels of each, and the most registers of decode.
QUANTISED = {"llama3-8b-int8": 128}
if NIGHTLY:
    QUANTISED |= {
        "llama3-8b-float8_e4m3fn": 128,
        "llama3.2-1b-int8": 128,
        "window-int8": 128,
        "gemma2-2b-first-int8": 168,
        "gemma2-2b-int8": 168,
        "gemma2-2b-float8_e5m2": 168,
        "48-heads-int8": 168,
        "llama3-8b-int4": 128,
        "llama3.2-1b-int4": 96,
        "96-int4": 128,
        "192-int4": 168,
        "gemma2-2b-int4": 168,
        "llama3-8b-k5v3": 128,
        "llama3.2-1b-k5v3": 96,
        "96-k5v3": 128,
        "192-k5v3": 168,
        "gemma2-2b-k5v3": 168,
    }
CUT_QUANTISED = ("gemma2", "96", "192")  # whose contexts are, as of `CUT`
WIDE_QUANTISED = ["512-int8", "512-float8_e4m3fn", "512-float8_e5m2", "512-window-int8"] * NIGHTLY


# Over latent rows, and the kernels of each. A thread block fills a multiprocessor, 512 threads of 128 registers.
LATENT = {"deepseek-v2-lite": ("decode",)}
if NIGHTLY:
    LATENT |= {
        "deepseek-v2-lite-prefill": ("decode", "prefill"),
        "deepseek-v3": ("decode",),
        "deepseek-v2-lite-tree": ("decode", "prefill"),
        "kimi-k2": ("decode", "prefill"),
        "deepseek-v3-prefill": ("decode", "prefill"),
        "latent-window": ("decode", "prefill"),
    }


# What updates states, and how many thread blocks of 128 threads share a multiprocessor.
STATES = {"qwen3-next": 3}
if NIGHTLY:
    STATES |= {
        **dict.fromkeys(("kimi-linear", "nemotron-h", "falcon-h1", "qwen3-next-16-bits", "qwen3-next-snapshots"), 3),
        **dict.fromkeys(("qwen3-next-4-tokens", "falcon-h1-prompts"), 3),
        "olmo-hybrid": 4,
        **dict.fromkeys(("qwen3-next-prompts", "kimi-linear-prompts", "keys-256"), 2),
    }


# And how many kernels it takes: a list of work, both of decode; over latent rows of int8 XLA runs.
CHOSEN = (
    {"chosen": 3, "chosen-plain": 3, "chosen-int8": 3, "chosen-int4": 3, "chosen-latent-int8": 0} if NIGHTLY else {}
)
# Where there is no kernel: the most operations of a step of the loop.
IN_XLA = {"xla-prefill": 26} | ({"xla-decode": 20} if NIGHTLY else {})
KEPT = ["bounds", "heads", "four bits"] * NIGHTLY
STEPS = ["step", *["step-shared"] * NIGHTLY]


@pytest.fixture(scope="module")
def reports():
    """Everything that gpu_compile_states.py, gpu_compile.py and gpu_widen.py print, by job, of each: by name "",
    "attention" and "widen". One process runs all."""
    controls = ("no-fence", "too-many-registers", "not-donated", "not-unique") * NIGHTLY
    jobs = [*DECODE_BUDGETS, *PREFILL, *FORMS, *QUANTISED, *WIDE_QUANTISED, *LATENT, *STEPS, *CHOSEN, *KEPT]
    jobs += [*IN_XLA, "launches-of-two", *["launches", "scanned", "other-launches"] * NIGHTLY]
    jobs += [f"control-{name}" for name in controls]
    controls = ["control-beside-swizzle", *["control-not-donated", "control-no-fence", "control-misaligned"] * NIGHTLY]
    jobs = [f"attention:{job}" for job in dict.fromkeys(jobs)] + ["widen:halved", "widen:control: halved"]
    found = {"": {}, "attention": {}, "widen": {}}
    for job in printed_by("gpu_compile_states.py", *STATES, *ALL_CHUNKS, *ODD, *controls, *jobs):
        for name, said in job.items():
            script, _, own = name.partition(":") if ":" in name else ("", "", name)
            found[script][own] = said
    return found


@pytest.fixture(scope="module")
def states_report(reports):
    return reports[""]


@pytest.fixture(scope="module")
def report(reports):
    return reports["attention"]


def printed_by(name, *jobs, first_in_path=None):
    """What a script of tests/support says, in a process of its own.

    Args:
      first_in_path: a folder of the extra `compile`, whose programs come before those that the machine has.
    """
    script = pathlib.Path(__file__).parents[1] / "support" / name
    path = os.pathsep.join([str(script.parents[2]), SITE, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "XLA_FLAGS": ""}
    if first_in_path is not None:
        environment["PATH"] = os.pathsep.join([str(pathlib.Path(SITE) / first_in_path), environment["PATH"]])
    run = subprocess.run([sys.executable, script, *jobs], env=environment, capture_output=True, text=True, timeout=1700)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line.removeprefix("JOB ")) for line in run.stdout.splitlines() if line.startswith("JOB ")]


@pytest.mark.parametrize("name", IN_XLA)
def test_without_a_kernel_steps_are_long(name, report):
    """A step of a loop is as many launches however much it computes. None of it is as large as the pool."""
    assert report[name]["launches"] <= IN_XLA[name]
    assert 2**26 < report[name]["temp"] < 2**28 and not report[name]["as_large"]


@pytest.mark.skipif(not NIGHTLY, reason="programs for eight devices take long to compile")
def test_eight_devices_of_one_box():
    """Each has its heads' kernels, pools in place, no more memory for larger ones, and one sum a layer."""
    ((small, large),) = printed_by("gpu_devices.py")
    for program in (small, large):
        assert program["kernels"] == 5  # a list of work, and two for each layer
        assert program["alias"] >= program["pool"]
        assert program["collectives"] == ["all-reduce"] * 2
    assert large["pool"] > 1.9 * small["pool"] and large["temp"] == small["temp"] < 5 * 2**20


@pytest.mark.parametrize("name", DECODE_BUDGETS)
def test_decode_within_budget(name, report):
    registers, shared_memory = DECODE_BUDGETS[name]
    kernel = report[name]["paged_decode_split"]
    assert kernel["target"] == "sm_90a"
    assert kernel["spills"] == 0
    assert kernel["registers"] <= registers
    assert kernel["shared_memory"] <= shared_memory
    assert kernel["wgmma"] > 0 and kernel["bulk_copies"] >= 3  # q, K and V
    assert kernel["proxy_fences"] == 3  # the queries laid out, before the product with V, before the output leaves


# Two thread blocks of 128 threads a multiprocessor where rows are few; else as many as can be.
MERGES = [("step", 184), *[("llama3-8b", 184), ("one-kv-head", 184), ("llama2-7b", 104)] * NIGHTLY]


@pytest.mark.parametrize(("name", "registers"), MERGES)
def test_merge_within_budget(name, registers, report):
    """... and it starts while the other runs, whose end it waits for."""
    merge = report[name]["paged_decode_merge"]
    assert merge["early_launch"] == ["wait"]
    assert report[name]["paged_decode_split"]["early_launch"] == ["launch_dependents"]
    assert merge["spills"] == 0 and merge["registers"] <= registers
    assert merge["proxy_fences"] == 1


def test_list_of_work_within_budget(report):
    plan = report["step"]["paged_decode_plan"]
    assert plan["spills"] == 0 and plan["shared_memory"] <= 8192


@pytest.mark.parametrize("name", PREFILL + FORMS)
def test_prefill_within_budget(name, report):
    kernel = report[name]["paged_prefill"]
    assert kernel["target"] == "sm_90a"
    assert all(kernel["spills"] == 0 for kernel in report[name].values())  # the decode kernels of the step as well
    assert kernel["registers"] == 168 and kernel["shared_memory"] <= 227 * 1024
    assert registers_after_trade(kernel) <= 128 * 3 * kernel["registers"]
    assert kernel["wgmma"] > 0 and kernel["bulk_copies"] >= 3
    # The products with V, if they take their weights from registers: half of all where V has as many columns as a tile
    # has tokens, with the products with K.
    with_values = {"64-all": 2 / 3, "256-all": 1 / 5}.get(name.partition(":")[0], 1 / 2)
    assert kernel["of_registers"] == (kernel["wgmma"] * with_values if "registers" in name else 0)
    assert not kernel["serialized"]
    # Queries read, and laid out; V cleaned, and before the product with V; before the output leaves; and before zeros
    # do, where an item's context is not cut.
    ahead = "ahead" in name and "tree" not in name
    assert kernel["proxy_fences"] == (5 if name in CUT else 6) + 2 * ahead
    # Each product is waited for, but the next tile's with K while that with V goes on: the weights, which the sum that
    # is stored then is made of, are computed between the two waits.
    assert kernel["waits"] == (["0", "0", "1", "0"] if ahead else ["0", "0"])
    assert kernel["held"] or not ahead


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_within_budget(name, report):
    decode, prefill = (report[name][kernel] for kernel in ("paged_decode_split", "paged_prefill"))
    # At a head_dim of 256 prefill lacks some registers, and more with first tokens beside a window: to be found.
    spills = 4 if name == "llama3-8b-float8_e4m3fn" else 0
    assert decode["spills"] == 0 and prefill["spills"] <= (spills if QUANTISED[name] <= 128 else 72)
    assert decode["registers"] <= QUANTISED[name]
    assert decode["shared_memory"] <= (113_000 if QUANTISED[name] <= 128 else 227 * 1024)
    assert registers_after_trade(prefill) <= 128 * 3 * prefill["registers"] and prefill["shared_memory"] <= 227 * 1024
    # Decode multiplies K from registers; of prefill one more than in 16 bits, for K widened.
    assert decode["of_registers"] == decode["wgmma"] // 2
    assert decode["proxy_fences"] == 3 and prefill["proxy_fences"] == (6 if name.startswith(CUT_QUANTISED) else 7)
    assert decode["bulk_copies"] >= 5 and prefill["bulk_copies"] >= 5  # q, K, V, and the scales of both


@pytest.mark.parametrize("name", WIDE_QUANTISED)
def test_wide_quantised_heads_within_budget(name, report):
    decode, prefill = (report[name][kernel] for kernel in ("paged_decode_split", "paged_prefill"))
    for kernel, fences in ((decode, 4), (prefill, 7)):
        assert kernel["spills"] == 0 and kernel["registers"] <= 168 and kernel["shared_memory"] <= 227_000
        assert kernel["proxy_fences"] == fences
    assert registers_after_trade(prefill) <= 128 * 3 * prefill["registers"]


@pytest.mark.parametrize("name", LATENT)
def test_latent_within_budget(name, report):
    assert all(kernel["spills"] == 0 for kernel in report[name].values())
    for which in LATENT[name]:
        kernel = report[name][f"paged_latent_{which}"]
        assert kernel["target"] == "sm_90a"
        assert kernel["registers"] == 128 and kernel["shared_memory"] <= 227 * 1024
        assert kernel["traded"]["inc"] > 128 > kernel["traded"]["dec"]
        assert 128 * kernel["traded_in_all"] <= 64_512  # of one warpgroup that weighs, two that sum, one that copies
        # Queries times keys, and weights times either half of the values: a step for every 16 numbers.
        shape = pallas_kernels.SHAPES.get(name.removesuffix("-prefill").removesuffix("-tree"))
        if shape is not None:
            assert kernel["wgmma"] == shape.head_dim // 16 + 64 // 16 * shape.rank // 128
        assert kernel["proxy_fences"] == 6  # weights and V cleaned and the output, of each half, and the last factor


def registers_after_trade(kernel):
    """Of a thread block of two consumer warpgroups and one producer. What is not there is waited for, for ever."""
    assert set(kernel["traded"]) == {"inc", "dec"}
    return 2 * 128 * kernel["traded"]["inc"] + 128 * kernel["traded"]["dec"]


@skip_by_day("a negative control of what is counted, whose kernel takes long to compile")
def test_too_many_registers_show(report):
    """Negative control: nothing spills, and the chip would hang."""
    kernel = report["control-too-many-registers"]["paged_prefill"]
    assert kernel["spills"] == 0 and kernel["registers"] == 168
    assert registers_after_trade(kernel) > 128 * 3 * kernel["registers"]


def test_launches(report):
    """The write and the attention of a decode layer: one each, and one more where rows may be cut; the list of work is
    one for all layers. By day they are counted together, of two layers."""
    assert report["launches-of-two"] == {"128, 1": 2 * 3 + 1, "16, 1": 2 * 2 + 1}
    if NIGHTLY:
        assert report["launches"] == {"128, 1": {"layer": 3, "step": 1}, "16, 1": {"layer": 2, "step": 1}}


@pytest.mark.skipif(not NIGHTLY, reason="takes long to compile; by day those of a decode step")
def test_launches_of_other_steps(report):
    few, prefill = (report["other-launches"][name] for name in ("128, 4", "128, 2048"))
    assert few == {"layer": 3, "step": 1}
    # Queries are read and the output is written by the kernel of prefill, whose list takes XLA some sums.
    assert prefill["layer"] == 2 and prefill["step"] <= 8


@skip_by_day("a negative control of what is counted, whose kernel takes long to compile")
def test_missing_fence_shows(report):
    """Negative control: the interpreter cannot see it, the count of fences does."""
    assert report["control-no-fence"]["paged_decode_split"]["proxy_fences"] == 2


@pytest.mark.parametrize("name", STEPS)
def test_step_updates_the_pools_in_place(name, report):
    step = report[name]
    assert step["alias_bytes"] == step["pool_bytes"]
    assert step["pool_copies"] == 0
    assert step["temp_bytes"] < step["pool_bytes"] / 20
    # One a pool, and of who stands where in a group; unique: no atomics.
    assert step["unique_scatters"] == step["scatters"] == (3 if "shared" in name else 2)


@pytest.mark.parametrize("name", KEPT)
def test_layers_that_keep_bounds_or_scales_of_groups_or_evict_by_heads(name, report):
    step = report[name]
    lists = {"bounds": 1, "heads": 2, "four bits": 1}[name]  # of work: one for each group of layers
    assert step["kernels"] == lists + 4 and step["pool_copies"] == 0  # split and merge of each layer
    assert step.get("scale_copies", 0) == 0
    assert step["alias_bytes"] >= step["pool_bytes"] and step["temp_bytes"] < 0.1 * step["pool_bytes"], step


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_rows_are_brought_together(name, report):
    """Of the pool they alone are copied, beside what rows were cut into: 36 MB of latent rows."""
    step = report[name].pop("step")
    assert all(kernel["spills"] == 0 for kernel in report[name].values())
    assert step["kernels"] == CHOSEN[name] and step["launches"] <= 11 and step["scatters"] == 0
    assert step["pool_copies"] == 0 and not step["made as large"]
    assert step["temp_bytes"] < min(step["brought"] + 54e6, step["pool_bytes"] / 9)


@pytest.mark.parametrize("name", STATES)
def test_states_are_updated_where_they_lie(name, states_report):
    """One kernel a layer, and what hides padding; no copy of the pools, and thread blocks enough to hide latencies."""
    step, many = states_report[name], name.endswith(("prompts", "tokens"))
    assert step["target"] == "sm_90a" and step["spills"] == 0
    assert STATES[name] * 128 * -(-step["registers"] // 8) * 8 <= 65_536
    assert STATES[name] * (step["shared_memory"] + 1024) <= 233_472
    assert step["bulk_copies"] == 1
    assert step["proxy_fences"] == 1  # between rows that share a slot
    assert step["alias_bytes"] == step["pool_bytes"] and step["pool_copies"] == step["scatters"] == 0
    assert step["temp_bytes"] < step["pool_bytes"] / (10 if many else 200)
    assert step["kernels"] == 2 and step["launches"] <= 11  # seven for all layers, and two each


CHUNKS = ["nemotron-h-prompts", "granite-4-prompts"] * NIGHTLY


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_within_budget(name, states_report):
    """Two halves of each operand that is not an input: a step of the matrix unit for every 16 numbers."""
    step = states_report[name]
    check_walk(step)
    # C B^T, C and the state, tokens' weights and inputs, inputs and B.
    assert step["wgmma"] == 8 + 2 * 8 + 2 * 4 + 2 * 2 * 4
    assert step["bulk_copies"] == 2 * 5  # three inputs, of which two in pieces of 64 keys, ahead of the loop and in it
    # A zero; before a row, x, B and the state laid out, what is gained; before a row, C laid out, weights, the output.
    assert step["proxy_fences"] == 8
    assert step["alias_bytes"] == step["pool_bytes"] and step["pool_copies"] == step["scatters"] == 0
    check_few(step["ahead"][0], 3)  # a layer has the kernel of rows of few tokens, too
    assert step["kernels"] == 4 and step["launches"] <= 16  # ten for all layers, and three each


def check_walk(kernel):
    """Asserts that a multiprocessor has room for both warpgroups of a walk, and that they spill nothing."""
    assert kernel["target"] == "sm_90a" and kernel["spills"] == 0 and not kernel["serialized"]
    assert kernel["shared_memory"] + 1024 <= 233_472 and 2 * 128 * -(-kernel["registers"] // 8) * 8 <= 65_536


def check_few(kernel, blocks):
    """Asserts that so many thread blocks of the kernel that takes token by token share a multiprocessor."""
    assert kernel["spills"] == 0 and blocks * 128 * -(-kernel["registers"] // 8) * 8 <= 65_536
    assert blocks * (kernel["shared_memory"] + 1024) <= 233_472


# And a head's keys.
DELTA_CHUNKS = {
    "qwen3-next-chunks": 128,
    "qwen3-next-chunks-16-bits": 128,
    "qwen3-next-mixed": 128,
    "delta-64-chunks": 64,
}
DELTA_CHUNKS = DELTA_CHUNKS if NIGHTLY else {}


@pytest.mark.parametrize("name", DELTA_CHUNKS)
def test_delta_chunks_within_budget(name, states_report):
    """Three thread blocks of what is done before the walk share a multiprocessor."""
    step, pieces = states_report[name], DELTA_CHUNKS[name] // 64
    few, pairs = step["ahead"]
    check_few(few, 2 if name in ("qwen3-next-chunks-16-bits", "qwen3-next-mixed") else 3)  # two with snapshots
    check_walk(step)
    check_few(pairs, 3)
    assert pairs["target"] == "sm_90a" and not pairs["serialized"]
    # Keys with keys and queries; a join, which a loop does five times. Four steps each for 64 numbers, of numbers in
    # halves two times, or three.
    assert pairs["wgmma"] == 4 * (2 * pieces + 2 * 3) and pairs["of_registers"] == 0
    # The state with keys and queries; gains, what tokens get of them, and the state, all keys at once.
    assert step["wgmma"] == 4 * (2 * 2 * pieces + 2 * 3 + 2)
    assert step["of_registers"] == 4 * (2 * pieces + 3 + 2)  # all but what outputs take
    assert pairs["bulk_copies"] == 2 * pieces
    # Keys, sums, values and squares; queries, sums and squares: ahead of the loop, and in it.
    assert step["bulk_copies"] == 2 * (4 + 3)
    # A zero; inputs; what tokens get; twice in a join; the inverse.
    assert pairs["proxy_fences"] == 6
    # A zero; before a row, the state given, before the next chunk's tokens are brought, gains given; before a row,
    # before the next chunk's queries are brought, the output.
    assert step["proxy_fences"] == 8
    assert step["alias_bytes"] == step["pool_bytes"] and step["pool_copies"] == step["scatters"] == 0
    # Both layers have the same queries and keys, and so one kernel before their walks; and that of few tokens each.
    assert step["kernels"] == 5 and step["launches"] <= (25 if name == "qwen3-next-mixed" else 22)


CHANNEL_CHUNKS = ["kimi-linear-chunks", "kimi-linear-chunks-16-bits"] * NIGHTLY


@pytest.mark.parametrize("name", CHANNEL_CHUNKS)
def test_channel_chunks_within_budget(name, states_report):
    """Two thread blocks of what is done before the walk share a multiprocessor."""
    step = states_report[name]
    few, pairs = step["ahead"]
    check_few(few, 2)
    check_walk(step)
    check_few(pairs, 2)
    assert pairs["target"] == "sm_90a" and not pairs["serialized"]
    # Gates, in halves, of 64 channels, of which loops do two: since and until, and to a border, of which another does
    # three. Queries and keys to keys, in three pairs of halves: of eight tokens, and in that loop. A join, which a loop
    # does five times.
    assert pairs["wgmma"] == 4 * (4 * 2 + 2 * 2 * 3 + 2 * 3)
    assert pairs["of_registers"] == 4 * (4 * 2 + (2 + 1) * 3)  # all but keys, of the loop, and joins
    # The state with keys and queries, gains, what tokens get of them, and the state, all keys at once.
    assert step["wgmma"] == 4 * (2 * 2 * 3 + 2 * 3 + 3)
    assert step["of_registers"] == 4 * (2 * 3 + 3 + 3)  # all but what outputs take
    assert pairs["bulk_copies"] == 2 * 3  # queries, keys and gates
    # Two operands, a square, decays and values; an operand and a square: ahead of the loop, and in it.
    assert step["bulk_copies"] == 2 * (5 + 2)
    assert step["alias_bytes"] == step["pool_bytes"] and step["pool_copies"] == step["scatters"] == 0
    assert step["kernels"] == 5 and step["launches"] <= (21 if name.endswith("bits") else 18)


ALL_CHUNKS = [*DELTA_CHUNKS, *CHANNEL_CHUNKS, *CHUNKS]


@pytest.mark.parametrize("name", ALL_CHUNKS)
def test_the_newest_assembler_spills_nothing_of_chunks(name):
    """The one that `pip` brings, which JAX takes where PATH has none; others keep other numbers in registers."""
    ((step,),) = (job.values() for job in printed_by("gpu_compile_states.py", name, first_in_path="nvidia/cu13/bin"))
    for kernel in (step, *step["ahead"]):
        assert kernel["spills"] == 0 and not kernel["serialized"]


SHOWN = "control-misaligned", "control-beside-swizzle"
ODD = ["odd-space-chunks", *["odd-delta-chunks", "odd-space-tokens", "odd-delta-tokens"] * NIGHTLY]


def test_nothing_is_loaded_or_copied_beside_its_alignment(report, states_report):
    """A GPU dies of it, and no interpreter sees it."""
    found = {name: step["misaligned"] for name, step in states_report.items() if name not in SHOWN}
    found |= {
        (name, i): kernel["misaligned"]
        for name in [*DELTA_CHUNKS, *CHANNEL_CHUNKS]
        for i, kernel in enumerate(states_report[name]["ahead"])
    }
    of_attention = [said for step in report.values() for said in step.values() if isinstance(said, dict)]
    for nth, said in enumerate(of_attention):  # places in rings, of copies and barriers, it does not work out
        found[nth] = [text for text in said.get("misaligned", []) if not re.search(r"cp\.async|mbarrier", text)]
    assert len(found) > len(states_report) and not any(found.values())


def test_all_swizzled_places_begin_with_the_pattern(report, states_report):
    """Elsewhere a thread takes other numbers than a bulk copy put there; no interpreter sees it, nor a sanitizer."""
    steps = [step for name, step in states_report.items() if name != "control-beside-swizzle"]
    steps += [said for step in report.values() for said in step.values() if isinstance(said, dict)]
    looked_at = [step for step in steps if "beside_swizzle" in step]
    assert sum(step["swizzled"] > 0 for step in looked_at) > 5
    assert not any(step["beside_swizzle"] for step in looked_at)
    (found,) = states_report["control-beside-swizzle"]["beside_swizzle"]
    assert "begins at a multiple of 128 bytes, not of 1024" in found


def test_numbers_in_halves(reports):
    """The kernel's PTX is run in NumPy: each half is the rest rounded."""
    assert reports["widen"]["halved"]["wrong"] == [0, 0]
    leading, rest = reports["widen"]["control: halved"]["wrong"]
    assert leading == 0 and rest > 1000


@skip_by_day("negative controls of what is counted")
def test_misaligned_loads_show(states_report):
    """Of two numbers each, where a chunk begins at any token."""
    misaligned = states_report["control-misaligned"]["misaligned"]
    assert misaligned and all("ld.v2.b32" in text for text in misaligned)


@skip_by_day("negative controls of what is counted")
def test_copied_states_and_missing_fences_show(states_report):
    copied = states_report["control-not-donated"]
    assert copied["alias_bytes"] == 0 and copied["pool_copies"] == 2
    assert states_report["control-no-fence"]["proxy_fences"] == 0


@pytest.mark.skipif(not NIGHTLY, reason="takes long to compile; by day test_tpu.py has it")
def test_scanned_layers_update_their_pool_in_place(report):
    """A list of work, one decode and one merge kernel for all layers. XLA copies a layer's weights to multiply with
    them, no pool."""
    step = report["scanned"]
    assert step["alias_bytes"] >= step["pool_bytes"]
    assert step["pool_copies"] == 0
    assert step["temp_bytes"] < 1.05 * step["weights of a layer"] < step["pool_bytes"] / 4
    assert step["unique_scatters"] == step["scatters"] == 1
    assert step["kernels"] == 3


@pytest.mark.skipif(not NIGHTLY, reason="a step to compile")
def test_undonated_pools_show(report):
    """Negative control: what a step looks like that copies its pools."""
    assert report["control-not-donated"]["alias_bytes"] == 0
    assert report["control-not-donated"]["pool_copies"] > 0


@pytest.mark.skipif(not NIGHTLY, reason="a step to compile")
def test_scatter_with_atomics_shows(report):
    """Negative control: an update without the promise of unique indices."""
    assert report["control-not-unique"]["unique_scatters"] == 0
