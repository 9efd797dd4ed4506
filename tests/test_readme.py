"""The README's code runs, and what it points at is there."""

import pathlib
import re

import jax

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_the_snippet_runs():
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as in a user's session
        exec(snippet, names)
    assert names["out"].shape == (4, 1, 32, 128)
    assert names["cache"].lengths.tolist() == [513, 71, 4, 0]


def test_what_it_names_exists():
    for path in re.findall(r"(?:\]\(|`)((?:notebooks|benchmarks|tests|jaxkv|pallas_kernels)/[\w./-]+)", TEXT):
        assert (ROOT / path).exists(), path
