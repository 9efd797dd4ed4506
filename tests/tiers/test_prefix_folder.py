"""A folder of blocks that is not one index's alone: what others write there, remove, or may not be told of."""

import errno
import pathlib

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
