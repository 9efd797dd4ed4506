"""The figures of the README and of the page of figures are those of the benchmarks' results."""

import json
import re

from documents import ROOT
from test_adoption import changed_lines

import jaxkv
from pallas_kernels.common.quantization import FORMATS

TEXT = (ROOT / "docs/figures.md").read_text()


def read_table(start: str) -> list[list[str]]:
    """The cells of the page's table whose first column is named so, without its head."""
    (table,) = re.findall(rf"^\| {re.escape(start)} .*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def list_lines(text: str) -> list[str]:
    """The lines of a page's table of figures."""
    return [line for line in text.split("## Figures")[1].splitlines() if line.startswith("| ")][1:]


def measured(benchmark: str, wanted: dict | None = None) -> list[dict]:
    """The rows of a benchmark's results that have these entries, of all its tables; there must be some."""
    rows = json.loads((ROOT / f"benchmarks/results/{benchmark}.json").read_text())["rows"]
    rows = rows if isinstance(rows, list) else [row for table in rows.values() for row in table]
    found = [row for row in rows if all(row.get(name) == value for name, value in (wanted or {}).items())]
    assert found, f"{benchmark} has nothing with {wanted}"
    return found


def said_of_gpus() -> dict[str, list[str]]:
    """What the runs on an H200 say, in their order, of the lines that begin so."""
    decoded, prefilled = ((64, 8192), (1, 131_072), (256, 512)), ((1, 2048), (1, 8192))

    def rows(what: str, batch: int, context: int, *, block: int = 16, kind: str | None = None, **more) -> list[dict]:
        shape = {"heads": [32, 8], "head_dim": 128, "ragged": False, "chunk": None, "block": block, "kind": kind}
        return measured("gpu", shape | {"what": what, "batch": batch, "context": context} | more)

    def faster(what: str, by: str, size: tuple[int, int]) -> list[float]:
        """How many times as fast as another, in each run that had both."""
        both = zip(rows(what, *size, by="ours"), rows(what, *size, by=by), strict=False)
        return [theirs["seconds"] / ours["seconds"] for ours, theirs in both]

    tables = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())["rows"].values()
    profiled = rows("kernels", 64, 8192)
    runs = [table for table in tables if any(row in profiled for row in table)]
    reads = [max(row["bytes_per_second"] for row in table if row["what"] == "read") for table in runs]
    stored = 2 * 64 * 8192 * 8 * 128 * 2
    small, llama = (
        measured("gpu_generate", {"what": "decode", "model": model, "by": "ours", "rows": 8})[0]
        for model in ("smollm2-135m", "llama-3.1-8b")
    )
    (several,) = measured("gpu_generate", {"form": "steps_per_dispatch=8"})
    int8 = rows("decode", 64, 8192, block=32, kind="int8", by="ours")[1]  # of the last run that had bfloat16 beside it

    def step(kind: str, new: int, by: str) -> float:
        """Of a layer that keeps a state, in the last run that had it: microseconds."""
        *_, last = measured("gpu", {"what": "states", "kind": kind, "new": new, "by": by})
        return last["seconds"] * 1e6

    beside_fla = [
        f"{step(kind, new, 'ours'):.0f} us for {step(kind, new, 'flash-linear-attention'):.0f}"
        for new in (1, 2048, 225) for kind in ("qwen3-next", "kimi-linear")
    ]  # fmt: skip
    return {
        "GPU layers that keep a state": [
            *beside_fla[:3], f"XLA {step('qwen3-next', 2048, 'xla'):,.0f} us", *beside_fla[3:],
        ],
        "GPU decode on an H200": [
            f"{stored / row['device_seconds'] / read:.2f}"
            for row, read in zip(profiled, reads, strict=True)
        ]
        + [f"{row['share']:.2f}" for size in decoded for row in rows("decode", *size, by="ours")]
        + [f"{x:.2f}x" for size in decoded for x in faster("decode", "cudnn-paged", size)]
        + [f"{x:.1f}x" for size in decoded for x in faster("decode", "triton", size)],
        "GPU decode of the same": [f"{rows('decode', 64, 8192, by='ours')[1]['seconds'] / int8['seconds']:.2f}x"],
        "GPU prefill on an H200": [
            f"{x:.2f}" for size in prefilled for by in ("cudnn", "torch") for x in faster("prefill", by, size)
        ]
        + [f"{x:.2f}x" for x in faster("prefill", "torch", (4, 8192))],
        "GPU steps of whole models": [
            f"{small['tokens_per_second']:,.0f} tokens/s", f"{8e3 / several['step_ms']:,.0f}",
            f"{llama['tokens_per_second']:,.0f}, {llama['share']:.2f} of the rate",
        ],
    }  # fmt: skip


def said_of(line: str) -> list[str]:
    """What the results say that a line of the README's figures says, by how the line begins."""

    def all_of(key: str, form: str, rows: list[dict]) -> list[str]:
        return [form.format(row[key]) for row in rows]

    def attention(key: str, form: str, fill: int) -> list[str]:
        return all_of(key, form, [row for row in measured("attention") if row["fill %"] == fill])

    def cycles(work: str) -> dict:
        (row,) = (row for row in measured("tpu_cycles", {"chip": "v6e", "work": work}) if row["shape"] != "gemma2-2b")
        return row

    long, chunk = "step, decode 64 x ", "chunk of 512 tokens on 4,096"
    quest = measured("evict", {"reads": "quest, bounds=True"})
    kept = [row for kind in ("layer", "head") for row in measured("evict", {"cache": kind})]
    adopted, (plain, *_), packed = measured("adoption"), measured("layers"), measured("capacity", {"block_size": 16})
    (reused,), (anew,) = (measured("serving", {"way": way}) for way in ("prefix reuse", "computed anew"))
    again, swapped = (measured("serving", {"set back": x})[0] for x in ("computed again", "swapped"))
    shared, contiguous = measured("cascade", {"prefix": 32768}), measured("capacity", {"block_size": "contiguous"})
    (chats,) = measured("serving", {"blocks of windows": "1.5 x their own"})
    beside, everywhere = (
        [row["share"] for row in measured("serving", {"blocks of windows": way})]
        for way in ("by what is kept", "as many blocks in every group")
    )
    alike, (short, slow, _) = measured("serving_order", {"step_tokens": 32})[0], measured("serving_order")[-3:]
    (waits,) = measured("serving_order", {"tokens in common": 32768})
    (chosen,), (scratch,) = (
        measured("chosen_tokens", wanted) for wanted in ({"step": "chooses and reads"}, {"context": 16384})
    )
    states, fresh, chunks = (measured("states", {"name": name})[0] for name in ("decode", "copy", "chunks"))
    local = [row for row in measured("serving") if row.get("outside of windows") == "given back"]
    loaded = measured("first_use", {"way": "generate"})
    smaller = [row["x smallest"] for row in measured("append") if row["blocks"] == 65536]
    by_line = {
        "decode attention, 8 rows": attention("dense / paged", "{:.0f}x", 10),
        "the same, full |": attention("dense / paged", "{:.1f}x", 100) + attention("of copy", "{:.2f}", 100),
        "the same, full, the write included": attention("flax / paged+write", "{:.1f}x", 100),
        "a decoder taken": all_of("dense / paged", "{:.1f}x", adopted)
        + all_of("compile, paged / dense", "{:.1f}x", adopted)
        + [str(len(changed_lines(row["style"]))) for row in adopted],
        "each further layer": [
            f"{plain['operations a layer']:.0f} operations", f"{plain['HLO lines a layer']:.0f} lines",
            f"{plain['compile s a layer']:.2f} s",
        ],
        "decode attention of 64 rows": all_of("alone / once", "{:.1f}x", shared)
        + all_of("alone / once", "{:.1f}x", measured("cascade", {"prefix": 512}))
        + all_of("bytes, % of alone", "{:.1f} %", shared),
        "decode attention of 8 rows": all_of("full / this", "{:.1f}x", kept) + all_of("this / short", "{:.2f}x", kept),
        "decode attention of 128 heads": [
            f"{chosen['times faster']:.1f}x", f"{chosen['of chosen rows and index keys']:.2f} times the bytes",
            f"{scratch['scratch, MiB']:.0f} MiB",
        ],
        "32 rows of Qwen3-Next": [
            f"{states['speed']:.2f} and {states['speed'] / fresh['speed']:.1f} times", f"{chunks['speed']:.1f}x"
        ],
        "decode attention of 2 rows": all_of("all / this", "{:.1f}x", quest),
        "cost of a step's write": [f"{min(smaller):.1f}x", f"{max(smaller):.1f}x"],
        "sequences in the same memory": all_of("times_contiguous", "{:.1f}x", packed)
        + [f"{100 * row['wasted']:.{digits}f} %" for rows, digits in ((packed, 1), (contiguous, 0)) for row in rows],
        "prefix reuse": [
            f"{reused['less prefill']:.1f}x", f"{reused['tokens/s'] / anew['tokens/s']:.1f}x the tokens per second"
        ],
        "memory of a model": all_of("share", "{:.2f}", local[:2] + local[-1:]),
        "too few blocks": [f"{swapped['tokens/s'] / again['tokens/s']:.2f}x"],
        "chats in turn": [
            f"{chats['share']:.2f} of it", f"leaves {min(beside):.2f} of",
            f"{min(everywhere):.2f} to {max(everywhere):.2f}",
        ],
        "8 prompts of": [f"{alike['shared']} tokens computed, not {alike['not shared']}"],
        "first token of a prompt": [
            f"after {short['to the first token of 8']} steps, not {slow['to the first token of 8']}",
            f"{waits['ms a step, one waits']:.2f} ms a step for {waits['ms a step, alone']:.2f}",
        ],
        "TPU decode step of 64 rows": [
            f"{cycles(long + '33,024')['step'] / cycles(long + '256 on 32,768 shared')['step']:.1f}x"
        ],
        "TPU prefill": [f"{cycles('prefill of 1,024 tokens')['kernel']:,} cycles"]
        + [f"{cycles(w)['kernel'] / cycles(w)['RPA v3']:.2f}x" for w in ("prefill of 1,024 tokens", chunk)],
        "TPU decode with the write": [
            f"{cycles('decode 8 x 1024')['of copies']:.2f}x",
            f"{cycles('decode 8 x 1024')['kernel'] / cycles('decode 8 x 1024')['RPA v3']:.2f}x",
        ],
        "the same decode, int8": [
            f"{cycles('decode 8 x 1024, int8')['kernel'] / cycles('decode 8 x 1024')['kernel']:.2f}x"
        ],
        "SmolLM2-135M from its GGUF file": all_of("loaded s", "{:.1f} s", measured("first_token")[1:])
        + all_of("first token s", "{:.1f} s", measured("first_token")),
        "`generate`, a random decoder": all_of("first, x", "{:.1f}x", loaded)
        + all_of("faster, second", "{:.1f}x", loaded),
        "SmolLM2-135M on one core": [
            form.format(row[key])
            for key, form in (
                ("8 rows x 96, tokens/s", "{:.0f}"), ("a token after 32, ms", "{:.0f}"),
                ("a token after 2048, ms", "{:.0f}"), ("prompt of 2048, s", "{:.1f}"),
            ) for row in measured("llama_cpp")
        ],
        "int8, float8 and int4 caches": [
            f"{row['cost, %']:.2f} %"
            for kind in ("int8", "float8_e4m3fn", "int4", "int4, residual 32", "k5v3, residual 32")
            for row in measured("quality", {"stored as": kind})
        ],
        "`generate`, 200 prompts": [],  # of several runs: see below
    } | said_of_gpus()  # fmt: skip
    (found,) = (figures for start, figures in by_line.items() if line.startswith(f"| {start}"))
    return found


def test_figures_are_those_measured():
    """Every line of the table is known, and says what the results say."""
    table = list_lines(TEXT)
    assert len(table) > 15
    for line in table:
        told = re.split(r"(?<!`)\|(?!`)", line)[3]
        for figure in said_of(line):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}", line), f"{figure} is not in: {told}"
    (static, continuous) = measured("generate")[:2]
    least, most = map(float, re.search(r"(\d\.\d)x to (\d\.\d)x the tokens per second, in", TEXT).groups())
    assert least <= round(continuous["tokens/s"] / static["tokens/s"], 1) <= most


def test_the_readme_has_some_of_them():
    """Each of its lines begins as one of the page's, and has no figure that this one has not."""
    readme = (ROOT / "README.md").read_text()
    known = set()
    for line in list_lines(readme):
        start = line.split("|")[1].strip().split(",")[0]
        there = "".join(found for found in list_lines(TEXT) if found.startswith(f"| {start}"))
        figures = re.findall(r"(?<![\d.])[\d.]+(?:x| %)", line.split("|", 2)[2])
        assert figures and all(figure in there for figure in figures), line
        known |= set(figures)
    bullets = re.findall(r"^- \*\*([\d.]+x)\*\*", readme, re.MULTILINE)
    assert len(bullets) == 4 and set(bullets) <= known
    (chip,) = re.findall(r"^- \*\*([\d.]+)\*\* of an NVIDIA H200's .* \*\*([\d.]+x)\*\*", readme, re.MULTILINE)
    (line,) = (line for line in list_lines(TEXT) if line.startswith("| GPU decode on an H200"))
    assert all(figure in line for figure in chip)


def test_quality_is_what_was_measured():
    """Each row of the page's table: more loss in percent, and needles found, of what was stored, kept or read."""
    tables = json.loads((ROOT / "benchmarks/results/quality.json").read_text())["rows"]
    needles = {(row["way"], row.get("share")): row for row in tables["needles"]}
    found: dict[str, list[str]] = {}

    def add(name: str, row: dict, way: str, share: float | None = None) -> None:
        there = needles.get((way, share), {})
        counts = [str(there.get(f"found at {length}", "-")) for length in (1024, 4096, 8192)]
        found[name] = [f"{row['cost, %']:.2f}", *counts]

    for row in tables["kinds"]:
        add(row["stored as"], row, f"stored as {row['stored as']}")
    for row in tables.get("windows", [])[1:]:
        way = f"window of {row['window']}, {row['sink tokens']} sink tokens"
        add(way, row, way)
    for row in tables.get("evict", [])[1:]:
        add(f"{row['score']}, {row['kept']} kept", row, row["score"], row["kept"])
    for row in tables.get("quest", [])[1:]:
        add(f"quest, {row['of the prompt']} read", row, "quest", row["of the prompt"])
    assert {name: cells for name, *cells in read_table("stored, kept or read")} == found


def test_formats_know_what_was_measured():
    costs = {row["stored as"]: max(row["cost, %"], 0) for row in measured("quality") if "stored as" in row}
    known = {name: format.loss for name, format in FORMATS.items() if format.is_quantized}
    assert known == {name: round(costs[name], 2) for name in known}


def test_storing_less_costs_what_was_measured():
    lines = (ROOT / "docs/store_less.md").read_text().splitlines()
    for row in measured("quality"):
        if (kind := row.get("stored as", "float32")) not in ("float32", "bfloat16"):
            dtype, _, residual = kind.partition(", residual ")
            rows = (line for line in lines if line.startswith("|") and f'"{dtype}"' in line)
            (line,) = (line for line in rows if ("residual_length" in line) == bool(residual))
            assert not residual or f"residual_length={residual}" in line
            assert f"{row['cost, %']:.2f} %" in line, kind
            config = jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=8, head_dim=128, max_seqs=1, max_seq_len=128)
            assert f"| {config.replace(dtype=dtype).bytes / config.bytes:.2f}" in line, kind
