"""What cannot be saved, and what does not fit where it is loaded, is refused in one sentence."""

import dataclasses
import json

import numpy as np
import pytest
from saved import LAYERS, append, config

import jaxkv
import jaxkv.models
from jaxkv._files import format as file_format, safetensors

OTHER_HEADS = (dataclasses.replace(LAYERS[0], num_kv_heads=4), *LAYERS[1:])
OTHER_WINDOW = (LAYERS[0], dataclasses.replace(LAYERS[1], window=None), *LAYERS[2:])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(model="gemma"), "is of the model 'llama', but 'gemma' was asked for"),
        (dict(config=config(layers=LAYERS[:2])), "has 4 layers, but the cache has 2"),
        (dict(config=config(layers=OTHER_HEADS)), "has layer 0 with num_kv_heads = 2, but the cache has 4"),
        (dict(config=config(layers=OTHER_WINDOW)), "has layer 1 with window = 6, but the cache has None"),
        (dict(config=config(dtype="float16")), "has layer 0 in bfloat16, but the cache has float16: load it into"),
        (dict(config=config(max_seq_len=25)), "Row 4 of .* has 26 tokens, but max_seq_len = 25"),
        (dict(config=config(num_blocks=13)), "need 14 blocks of 4 tokens, but 13 are free"),
        (dict(config=config(max_seqs=3)), "has 4 rows with tokens, but only 3 of the cache's 3 rows are empty"),
        (dict(rows=[0, 1]), "has 5 rows, but rows names 2: give each its row, or None"),
        (dict(rows=[0, 1, 2, 3, 3]), r"rows must be different rows from 0 to 4, not \[0, 1, 2, 3, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_one_sentence(saved, arguments, says):
    with pytest.raises(ValueError, match=says) as error:
        jaxkv.load(saved, **arguments)
    assert str(saved) in str(error.value) or "rows" in arguments


def test_what_does_not_fit_into_a_cache(saved):
    busy = append(jaxkv.init(config()), [0, 0, 0, 0, 7])
    with pytest.raises(ValueError, match="Row 4 of the cache is not empty: free it first"):
        jaxkv.load(saved, into=busy, rows=[0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="Row 1 of the cache is not empty"):  # reserved blocks would be lost
        jaxkv.load(saved, into=jaxkv.reserve(busy, [0, 9, 0, 0, 0]), rows=[0, 1, 2, 3, None])
    with pytest.raises(jaxkv.CacheFileError, match="need 14 blocks of 4 tokens, but 1 is free"):
        jaxkv.load(saved, into=jaxkv.extend(jaxkv.init(config(max_seqs=6, num_blocks=11)), [40, 0, 0, 0, 0, 0]))
    with pytest.raises(ValueError, match="takes config, for a new cache, or into"):
        jaxkv.load(saved, config(), into=busy)


def test_a_nameless_file_is_of_no_model(caches, path):
    jaxkv.save(path, caches["blocks of 4"])
    with pytest.raises(jaxkv.CacheFileError, match="does not say of which model, but 'llama' was asked for"):
        jaxkv.load(path, model="llama")


def test_what_cannot_be_saved(caches, path):
    cache = caches["blocks of 4"]
    for arguments, error, says in (
        (dict(rows=[5]), IndexError, "rows must be rows from 0 to 4"),
        (dict(rows=[1, 1]), ValueError, "must be different rows"),
        (dict(model=7), ValueError, "model must be a name or a fingerprint, a str, not 7"),
        (dict(metadata={"x": np.ones(2)}), ValueError, "metadata must be a dict of what JSON can hold"),
        (dict(metadata=["x"]), ValueError, "metadata must be a dict of what JSON can hold, not"),
        (dict(metadata={"x": float("nan")}), ValueError, "metadata must be a dict of what JSON can hold"),
    ):
        with pytest.raises(error, match=says):
            jaxkv.save(path, cache, **arguments)
    assert list(path.parent.iterdir()) == []


def test_what_is_no_path(caches, path):
    """Of whatever is read or written, in one sentence, and nothing is there afterwards."""
    cache, model = caches["blocks of 4"], jaxkv.models.small()
    engine = jaxkv.Engine(model, max_seqs=1, max_seq_len=16, num_blocks=4)
    files = (
        jaxkv.load, jaxkv.describe, lambda path: jaxkv.save(path, cache), engine.save, engine.load,
        jaxkv.testing.Trace(cache.config).html,
    )  # fmt: skip
    folders = (
        lambda path: jaxkv.models.save(model, path), jaxkv.models.load,
        lambda path: jaxkv.PrefixCache(cache.config, spill_bytes=1 << 20, disk=path, disk_bytes=1 << 20),
    )  # fmt: skip
    for call in (*files, *folders):
        for wrong in (5, None, "", b"x", ["x"]):
            if wrong is not None or call not in (files[-1], folders[-1]):
                with pytest.raises(ValueError, match="must be"):
                    call(wrong)
        for wrong in ("a\0b", "\ud800"):
            with pytest.raises(ValueError, match="has characters that no name of a file can have here"):
                call(wrong)
    for call in files:
        with pytest.raises(ValueError, match="is a folder: name a file in it"):
            call(path.parent)
    assert list(path.parent.iterdir()) == []


def test_other_files_and_newer_versions(saved):
    tensors, fields, _ = safetensors.read_all(saved)
    safetensors.write(saved, tensors, fields | {"version": "9"})
    with pytest.raises(
        jaxkv.CacheFileError, match="is in version 9 of the format, but this jaxkv knows versions up to 8: install"
    ):
        jaxkv.load(saved)
    safetensors.write(saved, tensors)
    with pytest.raises(jaxkv.CacheFileError, match="is a safetensors file, but not of a cache"):
        jaxkv.load(saved)
    with pytest.raises(FileNotFoundError):
        jaxkv.load(saved.parent / "nowhere")


def test_what_is_consistent_but_makes_no_sense(saved, monkeypatch):
    """As from another program that writes the format: the checksums are right."""
    description, tensors = file_format.open_saved(saved)
    for name, change in (
        ("tables.0", lambda x: x + 100),
        ("lengths", lambda x: x * 50),
        ("layer.0", lambda x: x.astype(np.float16)),
    ):
        changed = tensors | {name: change(tensors[name])}
        shapes = {n: x.shape for n, x in tensors.items()}
        with monkeypatch.context() as patch:
            dtypes = {n: x.dtype for n, x in changed.items()}
            patch.setattr(file_format, "_dtype", lambda config, name, dtypes=dtypes: dtypes[name])
            file_format.write_saved(saved, description, shapes, changed.values())
        with pytest.raises(jaxkv.CacheFileError, match="holds a cache that this version of jaxkv cannot make"):
            jaxkv.load(saved)


def test_int4_of_other_levels_is_refused(path):
    """Older files have the same arrays, but their bits stand for other numbers."""
    layers = (dataclasses.replace(LAYERS[0], dtype="int4"), dataclasses.replace(LAYERS[0], dtype="int8"))
    jaxkv.save(path, append(jaxkv.init(config(layers=layers)), [3, 0, 0, 0, 0]))
    tensors, fields, _ = safetensors.read_all(path)
    assert fields["version"] == "8"  # older readers say that they are too old
    np.testing.assert_array_equal(jaxkv.load(path).lengths[:1], [3])
    cache = json.loads(fields["cache"])
    layer, *others = cache["config"]["layers"]
    assert layer.pop("revision") == 3 and not any("revision" in other for other in others)
    del tensors[file_format.CHECKSUMS]
    for version, revision in (("7", {}), ("8", {"revision": 2})):
        changed = cache | {"config": cache["config"] | {"layers": [layer | revision, *others]}}
        with pytest.raises(jaxkv.CacheFileError, match="layer 0 is stored in int4 of another version, whose bits mean"):
            file_format.parse_saved(path, fields | {"version": version, "cache": json.dumps(changed)}, tensors)
