"""The README's code runs, what it points at is there, and it stays short."""

import re

import jax.numpy as jnp
from documents import ROOT, run_blocks

import jaxkv

TEXT = (ROOT / "README.md").read_text()
EIGHTHS = "▁▂▃▄▅▆▇█"


def test_it_is_read_in_five_minutes():
    assert len(TEXT.splitlines()) <= 130
    assert len(TEXT.split()) <= 1200


def test_it_says_what_people_search_for():
    searched = "speculative offload tensor sliding prefix pallas_kernels flashinfer quantized mla streaming"
    for word in searched.split():
        assert word in TEXT.lower(), word


def test_the_snippets_run(tmp_path, monkeypatch):
    names = run_blocks(TEXT, tmp_path, monkeypatch)
    assert names["out"].shape == (4, 1, 32, 128) and len(names["answer"]) <= 8
    assert names["cache"].lengths.tolist() == [513, 71, 4, 0]


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


def test_the_versions_last_proved_are_those_of_the_constraints():
    files = sorted((ROOT / "constraints").glob("jax*.txt"))
    assert files
    for file in files:
        (jax_version,) = re.findall(r"^jax==(.+)$", file.read_text(), re.MULTILINE)
        assert f"JAX {jax_version}" in TEXT, file


def test_what_it_names_exists():
    for path in re.findall(r"(?:\]\(|`)((?:notebooks|benchmarks|tests|jaxkv|pallas_kernels)/[\w./-]+)", TEXT):
        assert (ROOT / path).exists(), path


def test_a_kernel_is_tested_without_its_chip_as_contributing_says():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    exec(block, {})


def test_architecture_names_what_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in re.findall(r"`((?:jaxkv|pallas_kernels|tests)/[\w/]+(?:\.py)?)/?`", text):
        assert (ROOT / path).exists(), path
