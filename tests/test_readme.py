"""The README's code runs, and what it points at is there."""

import pathlib
import re

import jax
import jax.numpy as jnp
from test_adoption import changed_lines

import jaxkv

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
EIGHTHS = "▁▂▃▄▅▆▇█"


def test_the_snippets_run():
    """One after another, as in a user's session."""
    first, over_devices = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(first, names)
        assert names["out"].shape == (4, 1, 32, 128)
        assert names["cache"].lengths.tolist() == [513, 71, 4, 0]
        exec(over_devices, names)
    assert names["cache"].lengths.tolist() == [1, 1, 0, 0]
    assert names["cache"].pools[0].kv.sharding.spec[2] == "model"


def test_the_lines_of_the_diff_are_those_of_a_decoder():
    """What the paged one has and the dense one has not, all of it and in this order."""
    (block,) = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
    shown = [line[1:].strip() for line in block.splitlines() if line.startswith("+")]
    assert shown == [line.strip() for line in changed_lines("linen")]
    dense = (ROOT / "tests/adopted/linen_dense.py").read_text()
    unchanged = [line[1:] for line in block.splitlines() if line.startswith((" ", "-")) and "…" not in line]
    for line in unchanged:
        assert re.sub(r": [^,)]+", "", line) in re.sub(r": (?:Config|int)\b", "", dense), line


def test_figures_of_the_decoders_are_those_measured():
    import json

    rows = json.loads((ROOT / "benchmarks/results/adoption.json").read_text())["rows"]
    line = next(line for line in TEXT.splitlines() if "benchmarks/adoption.py" in line)
    said = [float(x) for x in re.findall(r"(\d+\.\d)x", line)]
    assert [int(n) for n in re.findall(r"(\d+), (\d+) and (\d+) lines", line)[0]] == [
        len(changed_lines(row["style"])) for row in rows
    ]
    assert said == [round(row[key], 1) for key in ("dense / paged", "compile, paged / dense") for row in rows]


def test_the_drawing_is_a_real_cache():
    _, *rows = re.search(r"```text\n(.*?)\n```", TEXT, re.DOTALL).group(1).splitlines()
    size = 16
    layers = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=8),)
    cache = jaxkv.init(
        jaxkv.CacheConfig(layers=layers, max_seqs=4, max_seq_len=8 * size, num_blocks=16, block_size=size)
    )
    cache = jaxkv.extend(cache, jnp.array([55, 70, 0, 3]))
    cache = jaxkv.extend(jaxkv.fork(cache, 1, 2), jnp.array([0, 0, 6, 0]))
    for row, (drawn, table, tokens) in enumerate(zip(rows, cache.tables[0].tables, cache.lengths, strict=True)):
        assert drawn.startswith(f"row {row}, {tokens} tokens")
        marks = {(column - 35) // 4: mark for column, mark in enumerate(drawn) if mark in EIGHTHS}
        full = {block: min(size, int(tokens) - i * size) for i, block in enumerate(table[table > 0].tolist())}
        assert marks == {block: EIGHTHS[-(-n * 8 // size) - 1] for block, n in full.items()}


def test_what_it_points_at_shows_everywhere():
    """On an index the README stands alone: no picture or link may lead into the repository."""
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", TEXT) == []


def test_the_versions_last_proved_are_those_of_the_constraints():
    files = sorted((ROOT / "constraints").glob("jax*.txt"))
    assert files
    for file in files:
        (jax_version,) = re.findall(r"^jax==(.+)$", file.read_text(), re.MULTILINE)
        assert f"JAX {jax_version}" in TEXT, file


def test_what_it_names_exists():
    for path in re.findall(r"(?:\]\(|`)((?:notebooks|benchmarks|tests|jaxkv|pallas_kernels)/[\w./-]+)", TEXT):
        assert (ROOT / path).exists(), path
