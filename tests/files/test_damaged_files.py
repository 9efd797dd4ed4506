"""Damage is noticed wherever it is, and a save that does not come to its end leaves the old file."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from saved import LAYERS, append, assert_same, config

import jaxkv
from jaxkv._files import format as file_format, safetensors


def refuse(path):
    with pytest.raises(jaxkv.CacheFileError, match=str(path)) as error:
        jaxkv.load(path)
    return str(error.value)


@pytest.fixture
def small(path):
    """A small file, and the bytes in it."""
    layers = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=3),)
    cache = append(jaxkv.init(config(layers=layers, max_seqs=2, num_blocks=5)), [6, 3])
    jaxkv.save(path, cache, model="m")
    return path, path.read_bytes()


def test_every_flipped_byte_is_noticed(small):
    path, whole = small
    header = 8 + int.from_bytes(whole[:8], "little")
    says = []
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        says.append(refuse(path))
    assert any("header cannot be read" in s for s in says[8:header])
    assert any("header is not what its checksum says" in s for s in says[8:header])
    assert "tensor lengths is not what its checksum says" in says[header]
    assert "tensor layer.0 is not what its checksum says" in says[-20]
    assert "is not what its checksum says" in says[-1]  # the checksums themselves


def test_every_truncation_is_noticed(small):
    path, whole = small
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert "truncated" in refuse(path)
    path.write_bytes(whole + b"\0")
    assert "damaged" in refuse(path)


def test_files_are_verified_in_pieces(caches, path, monkeypatch):
    jaxkv.save(path, caches["blocks of 4"])
    monkeypatch.setattr(file_format, "CHUNK", 7)
    assert_same(caches["blocks of 4"], jaxkv.load(path))


# Crashes.


def test_a_failing_save_leaves_the_old_file_and_nothing_else(caches, saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(safetensors, "as_bytes", lambda tensor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        jaxkv.save(saved, caches["contiguous"])
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


def test_a_link_stays_a_link(caches, saved):
    link = saved.with_name("link")
    link.symlink_to(saved)
    jaxkv.save(link, caches["contiguous"])
    assert link.is_symlink()
    assert_same(caches["contiguous"], jaxkv.load(saved))


# A process that saves all the time, killed at a random moment: fifty of them, forked from one that has imported all
# and started no thread. Its caches hold NumPy arrays, so that saving them needs no XLA.
KILLS = """
import os, pathlib, pickle, random, signal, sys, time
import jaxkv
from jaxkv._files import format as file_format, safetensors

folder = pathlib.Path(sys.argv[1])
caches, path = pickle.loads((folder / "caches").read_bytes()), folder / "saved"
wholes = []
for cache in caches:
    begin = time.perf_counter()
    jaxkv.save(path, cache)
    takes = time.perf_counter() - begin
    wholes.append(path.read_bytes())
unfinished = 0
for i in range(50):
    before = set(folder.glob(".saved.*.tmp"))
    child = os.fork()
    if not child:
        while True:
            for cache in caches:
                jaxkv.save(path, cache)
    if i % 2:  # whatever else the machine is doing, it is writing now
        while not set(folder.glob(".saved.*.tmp")) - before:
            pass
    else:
        time.sleep(random.random() * 4 * takes)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert path.read_bytes() in wholes, f"kill {i} left a file that is neither the old one nor the new one"
    left = list(folder.glob(".saved.*.tmp"))
    assert len(left) <= 1, left
    unfinished += len(left)
jaxkv.save(path, caches[0])
print(unfinished, len(list(folder.glob(".saved.*.tmp"))))
"""


def test_kill_9_in_the_middle_of_a_save_leaves_the_old_file_or_the_new_one(tmp_path):
    size = config(layers=LAYERS[:1], max_seq_len=4000, num_blocks=8000)
    caches = [jax.device_get(append(jaxkv.init(size), [n, 0, 100, 0, 0], seed=n)) for n in (4000, 3500)]
    (tmp_path / "caches").write_bytes(pickle.dumps(caches))
    result = subprocess.run([sys.executable, "-c", KILLS, tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    unfinished, left = map(int, result.stdout.split())
    assert unfinished >= 10, "too few of the kills hit a save that was writing"
    assert left == 0, "what dead writers left is removed"
    assert_same(jax.tree.map(jnp.asarray, caches[0]), jaxkv.load(tmp_path / "saved"))
