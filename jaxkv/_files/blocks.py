"""A folder of blocks: one file for each block of a group of layers, checked when it is read.

    folder/<who computed them>/<2 digits>/<hash of the block's chain>.<group>

The expected header is known before a file is read, so the header is compared and not parsed. A file of another config,
model, prompt or salt, or under another name, does not match. The arrays follow the header, and then a CRC-32 of
everything. A file that does not match to the byte counts as missing, and is removed.

Files appear whole or not at all (`replacing`), but are not flushed to the disk one by one: a file that a power failure
leaves half written does not match either.
"""

import collections
import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv._core.blocks.restore import layer_facts, leave_out_unset, pool_layers
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import MOST_INDEX, real, show
from jaxkv._core.state.state import Pool
from jaxkv._files import safetensors
from jaxkv._files.atomic import remove_leftovers, replacing
from jaxkv._files.paths import read_path

FORMAT, VERSION = "jaxkv block", 1
CHECKSUM = 4  # bytes at the end
LISTINGS = 8  # how often the folder is listed while the limit is written once
_HEX = "[0-9a-f]"
_NAME = re.compile(r"[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{40}\.[0-9]+")


ArraySpec = tuple[np.dtype, tuple[int, ...]]  # dtype and shape


class SavedBlock(NamedTuple):
    """A block's identity, or that of the states after its tokens: everything that the header of its file must state."""

    hash: bytes  # of the chain of blocks that ends with this one
    parent: bytes  # of the chain that ends before this block
    tokens: tuple[int, ...]
    group: int  # of layers that share a block table; the number of groups: of recurrent layers, their states
    depth: int = 0  # number of blocks before this one
    identity: Any = None  # of the owner; not in the file


def fingerprint(config: CacheConfig, model: str | None) -> bytes:
    """Returns 16 bytes that are equal for caches whose blocks are interchangeable: of the same layers, block size and
    model."""
    facts = [layer_facts(config, i) | {"shares_with": config.owner(i)} for i in range(len(config.layers))]
    layers = list(map(leave_out_unset, facts))
    for i in pool_layers(config):
        if config.kind(i).revision > 1:  # blocks of other bits are not found
            layers[i]["revision"] = config.kind(i).revision
    specs = [_layer_arrays(config, i).values() for layers in config.groups for i in layers]
    stored = [[(dtype.name, shape) for dtype, shape in layer_specs] for layer_specs in specs]
    said = [FORMAT, VERSION, config.block_size, config.groups, layers, stored, model]
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).digest()


class BlockFiles:
    """Blocks of one config and model in a folder, within a limit of `most_bytes`; with recurrent layers also states.

    The least recently used file is removed first, whoever owns it; file times carry the order to the next process.
    Several processes may use one folder at a time, and find each other's blocks. Each counts the bytes of the files
    that it has seen, and lists the folder again when it has written an eighth of the limit: all together exceed the
    limit by at most that for each of the others. A damaged or missing file, or a full disk, raises nothing: such a
    block counts as missing.

    Args:
      folder: created if missing. Files in it that are not blocks stay.
      most_bytes: limit for all blocks in the folder.

    Raises:
      ValueError: the folder cannot be written to, or `most_bytes` is not a valid limit.
    """

    def __init__(self, folder: str | os.PathLike, most_bytes: float, config: CacheConfig, model: str | None):
        self.folder = _writable(folder)
        whole = shutil.disk_usage(self.folder).total
        self.most_bytes = int(real("disk_bytes", most_bytes, above=0, most=whole))
        self.config, self.owner = config, fingerprint(config, model)
        # One entry a group, by layer; that of the states, if there are any, is the last.
        self._arrays = [{layer: _layer_arrays(config, layer) for layer in layers} for layers in config.groups]
        self.states_group = len(config.groups)
        if config.recurrent_layers:
            self._arrays.append({layers[0]: _state_arrays(config, layers) for layers in config.state_stacks})
        # Bytes by name, the least recently used first. A file's size is recorded only once the file exists.
        self.files = _list_blocks(self.folder)
        self.unlisted = 0  # bytes written since the folder was listed
        self.known: dict[str, SavedBlock] = {}  # blocks that were asked for
        self.lost: set[str] = set()  # damaged files that cannot be removed
        self.counts: collections.Counter[str] = collections.Counter()
        tokens = (MOST_INDEX,) * config.block_size
        headers = (self._header(SavedBlock(bytes(20), bytes(20), tokens, g)) for g in range(len(self._arrays)))
        largest = max(len(h) + CHECKSUM + self._count_bytes(g) for g, h in enumerate(headers))
        if self.most_bytes < largest:
            raise ValueError(f"disk_bytes must be at least a block's file, {largest} bytes, not {show(most_bytes)}.")
        self._make_room(self.most_bytes)  # an earlier process may have left more

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks in the folder that this process has seen."""
        return sum(self.files.values())

    def has(self, block: SavedBlock) -> bool:
        """Tells whether a block has a file. Only `read` checks the contents."""
        name = self._name(block)
        if name not in self.files and name not in self.lost:
            with contextlib.suppress(OSError):  # another process may have written it
                self.files[name] = (self.folder / name).stat().st_size
        if name not in self.files:
            return False
        self.known[name] = block
        return True

    def has_seen(self, block: SavedBlock) -> bool:
        """Tells whether a block had a file when it was last looked for."""
        return self._name(block) in self.files

    def keep(self, block: SavedBlock) -> bool:
        """Marks a block's file as just used, and tells whether it still exists: other processes may have removed it."""
        return self.has(block) and self._touch(self._name(block))

    def spare(self, block: SavedBlock) -> None:
        """Makes a block's file, if there is one, the first to be removed."""
        name = self._name(block)
        if name in self.files:
            self.files.move_to_end(name, last=False)
            with contextlib.suppress(OSError):  # for the next process
                os.utime(self.folder / name, (0, 0))

    def write(self, block: SavedBlock, contents: Sequence[Any], *, is_spare: bool = False) -> bool:
        """Writes a block's file from its contents, layer by layer, and tells whether this call wrote it.

        Args:
          is_spare: this file is the first to be removed, and no other file is removed for it.
        """
        if self.has(block) if is_spare else self.keep(block):
            return False
        name, header = self._name(block), self._header(block)
        data = [safetensors.as_bytes(np.asarray(x)) for x in jax.tree.leaves(list(contents))]
        size = len(header) + sum(map(len, data)) + CHECKSUM
        if size + is_spare * self.num_bytes > self.most_bytes or name in self.lost:
            return False
        path = self.folder / name
        try:
            if self.unlisted + size > self.most_bytes // LISTINGS:
                self._list_again()
            self._make_room(self.most_bytes - size)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, durable=False) as file:
                checksum = 0
                for buffer in (memoryview(header), *(memoryview(x) for x in data)):
                    file.write(buffer)
                    checksum = zlib.crc32(buffer, checksum)
                file.write(checksum.to_bytes(CHECKSUM, "little"))
        except OSError as error:
            self._say_once(error)
            return False
        self.files[name], self.known[name] = size, block
        self.unlisted += size
        self.counts["written"] += 1
        if is_spare:
            self.spare(block)
        return True

    def read(self, block: SavedBlock) -> Any:
        """Returns a block's contents, layer by layer: pools, or states `[1, ...]` by name with None for each attention
        layer. None if the file is missing or differs in any byte."""
        name, header = self._name(block), self._header(block)
        size = len(header) + self._count_bytes(block.group) + CHECKSUM
        path = self.folder / name
        try:
            data = path.read_bytes() if path.stat().st_size == size else b""
        except OSError:
            self._forget(name)
            return None
        if not data.startswith(header) or zlib.crc32(data[:-CHECKSUM]) != int.from_bytes(data[-CHECKSUM:], "little"):
            self.counts["damaged"] += 1
            self._remove(name)
            return None
        contents: dict[int, Any] = {}
        at = len(header)
        for layer, specs in self._arrays[block.group].items():
            arrays: dict[str, Any] = {}
            for field, (dtype, shape) in specs.items():
                arrays[field] = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape)
                at += arrays[field].nbytes
            contents[layer] = arrays if block.group == self.states_group else Pool.bundle(**arrays)
        self._touch(name)
        self.counts["read"] += 1
        if block.group == self.states_group:
            return tuple(contents.get(layer) for layer in range(len(self.config.layers)))
        return list(contents.values())

    def stats(self) -> dict[str, int]:
        """Returns the folder's contents and the counts so far. `refused`: blocks that the disk could not take."""
        names = ("written", "read", "dropped", "damaged", "refused")
        return {"disk_bytes": self.num_bytes} | {f"disk_blocks_{name}": self.counts[name] for name in names}

    def clear(self) -> None:
        """Removes the blocks of this config and model, including those of other processes."""
        own = f"{self.owner.hex()}/"
        for name in {
            *_list_blocks(self.folder, self.owner.hex()),
            *(name for name in self.files if name.startswith(own)),
        }:
            self._remove(name)

    def rename(self, model: str | None) -> None:
        """Goes on with the blocks of another model: those of the one before are not found."""
        self.owner = fingerprint(self.config, model)
        self.known, self.lost = {}, set()

    # The parts.

    def _count_bytes(self, group: int) -> int:
        is_states = group == self.states_group
        return self.config.bytes_per_state if is_states else self.config.bytes_per_group_block(group)

    def _name(self, block: SavedBlock) -> str:
        name = block.hash.hex()
        return f"{self.owner.hex()}/{name[:2]}/{name}.{block.group}"

    def _header(self, block: SavedBlock) -> bytes:
        said = {"hash": block.hash.hex(), "parent": block.parent.hex(), "tokens": block.tokens, "group": block.group}
        fields = {"format": FORMAT, "version": str(VERSION), "config": self.owner.hex(), "block": json.dumps(said)}
        specs: dict[str, ArraySpec] = {}
        for layer, own in self._arrays[block.group].items():
            kind = "state." if block.group == self.states_group else ""
            specs |= {f"{kind}{'layer' if field == 'kv' else field}.{layer}": spec for field, spec in own.items()}
        specs["checksum"] = (np.dtype(np.uint32), (1,))
        return safetensors.preamble(safetensors.header(specs, fields))

    def _touch(self, name: str) -> bool:
        """Makes a file the last to be removed, and tells whether it exists."""
        try:
            os.utime(self.folder / name)
        except PermissionError:  # the file belongs to another user
            pass
        except OSError:
            self._forget(name)
            return False
        if name in self.files:
            self.files.move_to_end(name)
        return True

    def _list_again(self) -> None:
        """Learns which files other processes have written and removed."""
        files = _list_blocks(self.folder)
        for name in self.lost:
            files.pop(name, None)
        self.known = {name: block for name, block in self.known.items() if name in files}
        self.files, self.unlisted = files, 0

    def _make_room(self, most_bytes: int) -> None:
        taken = self.num_bytes
        while taken > most_bytes:
            name, size = next(iter(self.files.items()))
            taken -= size
            self._remove(name)
            self.counts["dropped"] += 1

    def _remove(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError:
            self.lost.add(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self.known.pop(name, None)
        self.files.pop(name, None)

    def _say_once(self, error: OSError) -> None:
        self.counts["refused"] += 1
        if self.counts["refused"] == 1:
            warnings.warn(
                f"Blocks could not be written to {self.folder} ({error.strerror or error}), and are given up instead, "
                "to be computed again when they are asked for. This is said once; stats() counts them.",
                stacklevel=2,
            )


def _layer_arrays(config: CacheConfig, layer: int) -> dict[str, ArraySpec]:
    """Returns dtype and shape of a layer's data in a block, by the fields of a `Pool`."""
    names = ("kv", "scale", "bounds", "index", "index_scale")
    fields = zip(names, config.array_dtypes(layer), config.array_shapes(layer), strict=True)
    return {field: (dtype, shape[1:]) for field, dtype, shape in fields if shape is not None}


def _state_arrays(config: CacheConfig, layers: tuple[int, ...]) -> dict[str, ArraySpec]:
    """Returns dtype and shape of a row's states in recurrent layers whose states stand in one array, by name, as
    `jax.tree.leaves` orders them."""
    arrays = sorted(config.layers[layers[0]].states or (), key=lambda array: array.name)
    front = (1, len(layers)) if config.stacked else (1,)
    return {array.name: (np.dtype(array.dtype), (*front, *array.shape)) for array in arrays}


def _writable(folder: Any) -> pathlib.Path:
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"disk must be a folder, a path, not {show(folder)}.")
    path = read_path("disk", folder).absolute()  # independent of later changes of the working directory
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"disk must be a folder that can be written to, but {path} is none ({reason}).") from error
    return path


def _list_blocks(folder: pathlib.Path, owner: str = _HEX * 32) -> "collections.OrderedDict[str, int]":
    """Returns the bytes of a folder's blocks by name, of all owners or of one, the least recently used first."""
    found = []
    for place in folder.glob(f"{owner}/{_HEX * 2}/"):
        paths: list[pathlib.Path] = []
        with contextlib.suppress(OSError):  # a folder of another user, which cannot be read
            remove_leftovers(place)
            paths = list(place.iterdir())
        for path in paths:
            name = path.relative_to(folder).as_posix()
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                if _NAME.fullmatch(name):
                    status = path.stat()
                    found.append((status.st_mtime_ns, name, status.st_size))
    return collections.OrderedDict((name, size) for _, name, size in sorted(found))
