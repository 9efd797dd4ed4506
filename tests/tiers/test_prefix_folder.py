"""A folder of blocks that is not one index's alone: what others write there, remove, or may not be told of."""

import errno
import pathlib
import random

import pytest
from test_prefix import BLOCK, A, B, compute, make_config
from test_prefix_disk import files_of, fill, options

import jaxkv
from jaxkv._files import atomic


def test_files_that_others_removed_are_written_again(tmp_path):
    config = make_config()
    cache, prefix = jaxkv.init(config), jaxkv.PrefixCache(config, **options(tmp_path, config))
    cache, _ = compute(cache, 0, A)
    cache = jaxkv.free(prefix.insert(cache, 0, A), 0)
    prefix.flush(cache)
    written = files_of(tmp_path)
    for again in (
        prefix.flush,
        lambda cache: prefix.make_room(cache, config.num_blocks),
    ):  # from the device; by spilling
        for path in written:
            path.unlink()
        cache = again(cache) or cache
        if not files_of(tmp_path):  # it is on the host, and from there
            prefix.flush(cache)
        assert files_of(tmp_path) == written
    assert jaxkv.PrefixCache(config, **options(tmp_path, config)).match([*A, 1]).num_tokens == len(A) // BLOCK * BLOCK


def test_what_another_index_wrote_goes_with_reset(tmp_path):
    config = make_config()
    prefix = jaxkv.PrefixCache(config, **options(tmp_path, config))
    other = tmp_path / "no block"
    other.write_bytes(b"mine")
    fill(tmp_path, A)
    assert len(files_of(tmp_path)) > 1
    prefix.reset(jaxkv.init(config))
    assert files_of(tmp_path) == [other]


def test_salts_that_hide_themselves_are_told_apart(tmp_path):
    class Secret(str):
        def __repr__(self):
            return "'***'"

    config = fill(tmp_path, A, salt=Secret("one"))
    other = jaxkv.PrefixCache(config, **options(tmp_path, config))
    found = [
        other.match([*A, 1], salt=salt).num_tokens for salt in (Secret("two"), "two", Secret("one"), "one", b"one")
    ]
    assert found == [0, 0, len(A) // BLOCK * BLOCK, len(A) // BLOCK * BLOCK, 0]


def test_what_is_none_of_its_business_does_not_stop_it(tmp_path, monkeypatch):
    config = fill(tmp_path / "blocks", A)
    place = files_of(tmp_path / "blocks")[0].parent
    (place / f".n.{atomic.socket.gethostname()}.{10**20}.1.tmp").write_bytes(b"")  # of no process that there can be
    listed = pathlib.Path.iterdir

    def closed(path):
        if path.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(path)

    def of_others(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied")

    (place.parent.parent / "x" / "closed").mkdir(parents=True)
    monkeypatch.setattr(pathlib.Path, "iterdir", closed)
    monkeypatch.setattr(pathlib.Path, "unlink", of_others)
    prefix = jaxkv.PrefixCache(config, **options(tmp_path / "blocks", config))
    assert prefix.match([*A, 1]).num_tokens == len(A) // BLOCK * BLOCK


def test_a_folder_holds_a_file_at_least_and_stays_where_it_is(tmp_path, monkeypatch):
    config = make_config()
    largest = max(map(config.bytes_per_group_block, range(len(config.groups))))
    with pytest.raises(ValueError, match=r"disk_bytes must be at least a block's file, \d+ bytes, not "):
        jaxkv.PrefixCache(config, **options(tmp_path, config, disk_bytes=largest))
    monkeypatch.chdir(tmp_path)
    cache, prefix = jaxkv.init(config), jaxkv.PrefixCache(config, **options("here", config))
    monkeypatch.chdir(tmp_path.parent)
    cache, _ = compute(cache, 0, A)
    prefix.flush(prefix.insert(cache, 0, A))
    assert files_of(tmp_path / "here") and not (tmp_path.parent / "here").exists()


def test_indexes_of_one_process_mind_the_bytes_together(tmp_path):
    config = make_config()
    one = jaxkv.PrefixCache(config, **options(tmp_path, config))
    two = jaxkv.PrefixCache(config, **options(one.files, config))
    for prefix, prompt in ((one, A), (two, B)):
        cache, _ = compute(jaxkv.init(config), 0, prompt)
        prefix.flush(prefix.insert(cache, 0, prompt))
    size = sum(path.stat().st_size for path in files_of(tmp_path))
    assert one.stats()["disk_bytes"] == two.stats()["disk_bytes"] == size


def test_several_indexes_keep_one_limit(tmp_path):
    """Of processes, which do not tell each other what they write: each may exceed it by an eighth."""
    draw, config, most = random.Random(0), make_config(), 60_000
    indexes = [jaxkv.PrefixCache(config, **options(tmp_path, config, disk_bytes=most)) for _ in range(3)]
    caches, largest = [jaxkv.init(config) for _ in indexes], 0
    for turn in range(24):
        i = turn % 3
        prompt = [draw.randrange(100) for _ in range(28)]
        cache, _ = compute(indexes[i].make_room(caches[i], 10), 0, prompt)
        caches[i] = cache = jaxkv.free(indexes[i].insert(cache, 0, prompt), 0)
        indexes[i].flush(cache)
        indexes[i].check_invariants(cache)
        largest = max(largest, sum(path.stat().st_size for path in files_of(tmp_path)))
    assert 0.8 * most < largest <= most * 10 / 8
    assert indexes[i].match([*prompt, 1]).num_tokens == 28
    indexes[0].flush(caches[0])
    assert abs(indexes[0].stats()["disk_bytes"] - sum(p.stat().st_size for p in files_of(tmp_path))) <= most / 4
