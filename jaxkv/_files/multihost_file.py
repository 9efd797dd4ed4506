"""The file of a cache that several processes saved together: a manifest, and beside it a file of each process.

The file of a process is a saved cache (see `format`) with the KV heads on the devices of that process. The manifest
lists them as shards of the mesh's axis. Layers that are not sharded are whole in each file. Every save uses new names,
and old files are removed only after the next manifest is written, so a crash leaves the previous save.

    manifest: only the checksum of its header as a tensor; the header holds
      cache    as in a file of one process
      parts    name and shard numbers of each process's file
      shards   number of shards
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.mesh_shape import find_mesh
from jaxkv._core.state.errors import CacheFileError, DamagedFile
from jaxkv._core.state.multihost import exchange, list_processes
from jaxkv._files import format, safetensors
from jaxkv._files.format import AGAIN, CHECKSUMS, SavedCache

FORMAT, VERSION = "jaxkv cache in parts", "1"


class SavedShards:
    """The KV heads of a cache that lie on the devices of this process, which saves them."""

    def __init__(self, cache: Cache):
        pool = next(pool for pool in cache.pools if pool is not None)
        if pool.heads is None or pool.context is not None:
            raise ValueError(
                "A cache on several processes can be saved where it is divided over KV heads alone, but this one is "
                "divided over contexts: send its rows to a cache that is not, and save that."
            )
        if any(p is not None and p.num_shards > 1 for p in cache.pools):
            raise ValueError(
                "A cache on several processes can be saved where blocks hold all heads, but this one's have one: give "
                'the layers evict="layer", or send its rows to a cache of one process, and save that.'
            )
        mesh = find_mesh(cache.pools, pool.heads)
        assert mesh is not None
        self.count, self.processes = mesh.shape[pool.heads], list_processes(mesh)
        divided = [i for i, p in enumerate(cache.pools) if p is not None and not p.kv.is_fully_replicated]
        self.divided = frozenset(x for i in divided for x in cache.config.stack(i))
        here = jax.process_index()
        self.own = self._list_shards(cache.pools[divided[0]].kv) if divided else [0] * (here == self.processes[0])  # type: ignore[union-attr]
        self.is_first = here == self.processes[0]

    def config(self, config: CacheConfig) -> CacheConfig:
        """Returns the config of this process's share of the cache."""
        layers = []
        for i, layer in enumerate(config.layers):
            heads = layer.num_kv_heads
            if config.owner(i) in self.divided:
                heads = heads // self.count * len(self.own)
            layers.append(dataclasses.replace(layer, num_kv_heads=heads))
        return config.replace(layers=tuple(layers))

    def here(self, x: Any, read: Callable[[Any], Any]) -> np.ndarray:
        """Applies `read` to this process's heads of a pool's array; heads stay at the third axis."""
        pieces = {self._number(s): s.data for s in x.addressable_shards}
        own = [0] if x.is_fully_replicated else self.own
        return np.concatenate([np.asarray(read(pieces[number])) for number in own], axis=2)

    def _list_shards(self, x: jax.Array) -> list[int]:
        return sorted({self._number(s) for s in x.addressable_shards if s.replica_id == 0})

    @staticmethod
    def _number(shard: Any) -> int:
        start = shard.index[2].start
        return 0 if start is None else start // shard.data.shape[2]


def write_shards(
    path: pathlib.Path, saved: SavedCache, shards: SavedShards, write: Callable[[pathlib.Path, CacheConfig], None]
) -> None:
    """Writes this process's file with `write`, then the manifest once all processes are done. All processes call this.

    Raises:
      OSError: another process could not write its file. Errors of this process's `write` pass through.
    """
    token = exchange("save", secrets.token_hex(8), shards.processes)[0]
    me = jax.process_index()
    mine = _process_path(path, token, me)
    error = _catch_error(lambda: write(mine, shards.config(saved.config))) if shards.own else None
    try:
        _raise_everywhere("save's writing", error, path, shards)
    except OSError:
        mine.unlink(missing_ok=True)
        raise
    told = exchange("save's parts", json.dumps(shards.own), shards.processes)
    error = None
    if shards.is_first:
        files = {
            _process_path(path, token, p).name: json.loads(own) for p, own in zip(shards.processes, told, strict=True)
        }
        files = {name: own for name, own in files.items() if own}
        error = _catch_error(lambda: _write_manifest(path, saved, files, shards.count))
    _raise_everywhere("save's manifest", error, path, shards)


def open_saved(path: pathlib.Path) -> tuple[SavedCache, Mapping[str, np.ndarray]]:
    """Returns a file's description and tensors, written by one process or by several; verifies each file."""
    tensors, fields, header = safetensors.read_all(path)
    if fields.get("format") != FORMAT:
        return format.open_saved(path)
    if fields.get("version") != VERSION:
        raise CacheFileError(
            f"{path} is in version {fields.get('version')} of its format, but this jaxkv knows version {VERSION}: "
            "install a newer one."
        )
    if tensors.get(CHECKSUMS, np.zeros(0)).tolist() != [zlib.crc32(header)]:
        raise DamagedFile(f"{path} is damaged: its header is not what its checksum says. {AGAIN}")
    try:
        files, count = json.loads(fields["parts"]), int(fields["shards"])
        config = format.parse_config(json.loads(fields["cache"])["config"])
        found = [(numbers, *format.open_saved(path.with_name(name))) for name, numbers in files.items()]
        numbers = sorted(number for numbers, *_ in found for number in numbers)
        is_whole = len(found) == 1 or (len(numbers) == count and numbers == list(range(count)))
    except FileNotFoundError as error:
        raise DamagedFile(f"A part of {path} is not beside it: {error.filename}. {AGAIN}") from error
    except CacheFileError:
        raise
    except (TypeError, KeyError, AttributeError, IndexError, ValueError, RecursionError) as error:
        raise CacheFileError(
            f"{path} cannot be read by this version of jaxkv ({error}): load it with the version that saved it."
        ) from error
    if not is_whole or len({(saved.lengths, saved.groups) for _, saved, _ in found}) > 1:
        raise DamagedFile(f"{path} is damaged: its parts do not make a whole. {AGAIN}")
    _, first, shared = found[0]
    joined = JoinedTensors(shared, config, [(numbers, saved.config, own) for numbers, saved, own in found], count)
    return dataclasses.replace(first, config=config), joined


class JoinedTensors(Mapping[str, np.ndarray]):
    """The tensors of all processes' files, with sharded heads concatenated on access."""

    def __init__(self, shared: Mapping[str, np.ndarray], config: CacheConfig, files: list[Any], count: int):
        self._shared, self._config, self._files, self._count = shared, config, files, count

    def __getitem__(self, name: str) -> np.ndarray:
        what, _, number = name.partition(".")
        if what not in ("layer", "scale") or len(self._files) == 1:
            return self._shared[name]
        heads = self._config.layers[int(number)].num_kv_heads
        if all(config.layers[int(number)].num_kv_heads == heads for _, config, _ in self._files):
            return self._shared[name]  # whole in each file
        size, pieces = heads // self._count, {}
        for numbers, _, tensors in self._files:
            for i, shard in enumerate(numbers):
                pieces[shard] = tensors[name][:, :, i * size : (i + 1) * size]
        return np.concatenate([pieces[shard] for shard in range(self._count)], axis=2)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)


def _process_path(path: pathlib.Path, token: str, process: int) -> pathlib.Path:
    return path.with_name(f"{path.name}.{token}.{process}")


def _write_manifest(path: pathlib.Path, saved: SavedCache, files: dict[str, list[int]], count: int) -> None:
    fields = format.render_header(saved) | {"format": FORMAT, "version": VERSION}
    fields |= {"parts": json.dumps(files), "shards": str(count)}
    header = safetensors.header({CHECKSUMS: (np.dtype(np.uint32), (1,))}, fields)
    safetensors.write(path, {CHECKSUMS: np.array([zlib.crc32(header)], np.uint32)}, fields)
    old = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.\d+")
    for file in path.parent.iterdir():  # left by the previous manifest, or by an interrupted save
        if old.fullmatch(file.name) and file.name not in files:
            with contextlib.suppress(OSError):  # the next save tries again
                file.unlink()


def _catch_error(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _raise_everywhere(what: str, error: Exception | None, path: pathlib.Path, shards: SavedShards) -> None:
    """Raises in all processes if one of them failed."""
    told = exchange(what, "" if error is None else f"{type(error).__name__}: {error}", shards.processes)
    if error is not None:
        raise error
    for process, why in zip(shards.processes, told, strict=True):
        if why:
            raise OSError(f"Process {process} could not save its part of {path}, so what was there stays: {why}")
