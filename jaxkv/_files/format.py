"""The file of a saved cache: one safetensors file that any safetensors reader opens.

    lengths      i32[R]                        tokens of each saved row
    tables.g     i32[R, M]                     block table of each layer group: blocks from 1; 0: none
    held.g       i32[2, R]                     for a layer that evicts: the tokens that it holds, and `thinned`
    layer.i      [n, 2, K, block_size, D]      for each layer with a pool: block b at b - 1, keys at 0, values at 1;
                                               for a latent layer [n, 1, 1, block_size, D]
    scale.i      [n, 2, K, block_size, ...]    for each quantized layer: its scales
    index.i      [n, 1, 1, block_size, E]      for each layer with index keys; index_scale.i if they are quantized
    state.i.x    [R, ...]                      for each array x of a recurrent layer: the rows' states
    snapshots    i32[R, W]                     in column c the number of the row's state after (c + 1) * snapshot_every
                                               tokens, from 1; 0: none. Only if there are any
    snapshot.i.x [m, ...]                      those states: number s at s - 1
    checksums    u32[...]                      of the header, then of every tensor before this one

For a layer that evicts by heads, R is K * R in its group's tensors, all rows of the first head first.

The metadata in the header names the format, its version, the cache's config and, if given, the model.

The checksums come last, so that a cache is written layer by layer, with one layer in host memory. CRC-32 is quick and
finds damage. It is no signature, but a longer hash would be none either: whoever can change the file can change its
hash as well.
"""

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.restore import layer_facts, leave_out_unset, pool_layers
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig, StateArray, kind_of
from jaxkv._core.config.validation import MOST_TOKENS, integer, show
from jaxkv._core.state.errors import CacheFileError, DamagedFile
from jaxkv._files import safetensors
from jaxkv._files.atomic import replacing

# Version 1 has no stacked and no quantized caches and no latent layers, version 2 no layers that rotate or have chunks,
# version 3 no layers that evict, version 4 no recurrent layers, version 5 no snapshots, version 6 no index keys,
# version 7 no storage format that was revised. The versions are otherwise the same.
FORMAT, VERSION, KNOWN = "jaxkv cache", "8", ("1", "2", "3", "4", "5", "6", "7", "8")
# Written where they will do, so that older readers read the file too.
WITHOUT_STATES, WITHOUT_SNAPSHOTS, WITHOUT_INDEX, WITHOUT_REVISIONS = "4", "5", "6", "7"
CHECKSUMS, SNAPSHOTS = "checksums", "snapshots"
MOST_EMPTY_ROWS = 1 << 16  # limit of rows for a cache with fewer blocks: tables of more rows only take memory
CHUNK = 1 << 24  # bytes read at a time while a file is verified
AGAIN = "Get a whole copy of it, or save the cache again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedCache:
    """Description of a saved cache, as `describe` returns it.

    Fields:
      config: the config of the cache that was saved.
      lengths: tokens of each saved row.
      model, metadata: as given to `save`.
      block_size: tokens per block in the file.
      groups: the layers that share a block table in the file.
    """

    config: CacheConfig
    lengths: tuple[int, ...]
    model: str | None
    metadata: Mapping[str, Any]
    block_size: int
    groups: tuple[tuple[int, ...], ...]


def write_saved(
    path: pathlib.Path, saved: SavedCache, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[np.ndarray]
) -> None:
    """Writes a file.

    Args:
      shapes: shape of each tensor by name, in the order of the file.
      tensors: the tensors in that order; each is written before the next is asked for.
    """
    fields = render_header(saved, SNAPSHOTS in shapes)
    specs = {name: (_dtype(saved.config, name), shape) for name, shape in shapes.items()}
    specs[CHECKSUMS] = (np.dtype(np.uint32), (len(shapes) + 1,))
    header = safetensors.header(specs, fields)
    if len(header) > safetensors.MAX_HEADER:
        raise ValueError(
            f"metadata and tables would take {len(header)} bytes in the file's header, and it holds "
            f"{safetensors.MAX_HEADER}: save less of them, or keep them elsewhere."
        )
    checksums = [zlib.crc32(header)]
    with replacing(path) as file:
        file.write(safetensors.preamble(header))
        for tensor in tensors:
            data = safetensors.as_bytes(tensor)
            checksums.append(zlib.crc32(data))
            file.write(data)
        file.write(np.array(checksums, "<u4").tobytes())


def render_header(saved: SavedCache, has_snapshots: bool = False) -> dict[str, str]:
    """Returns the header's fields for a saved cache. Raises ValueError for metadata that JSON cannot hold."""
    version = WITHOUT_SNAPSHOTS if saved.config.recurrent_layers else WITHOUT_STATES
    version = WITHOUT_INDEX if has_snapshots else version
    has_index = any(layer.index_dim is not None for layer in saved.config.layers)
    version = WITHOUT_REVISIONS if has_index else version
    is_revised = any(saved.config.kind(i).revision > 1 for i in pool_layers(saved.config))
    fields = {"format": FORMAT, "version": VERSION if is_revised else version}
    fields["cache"] = json.dumps({"config": _render(saved.config), "groups": saved.groups, "size": saved.block_size})
    if saved.model is not None:
        fields["model"] = saved.model
    if not isinstance(saved.metadata, Mapping):
        raise ValueError(f"metadata must be a dict of what JSON can hold, not {show(saved.metadata)}.")
    if (name := _find_other_key(saved.metadata)) is not None:
        raise ValueError(
            f"metadata must be a dict of what JSON can hold, whose names are all strings, but it has {show(name[0])}: "
            "convert it first."
        )
    try:
        fields["metadata"] = json.dumps(dict(saved.metadata), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata must be a dict of what JSON can hold, but {error}: convert it first.") from error
    return fields


def _find_other_key(x: Any) -> tuple[Any] | None:
    """Returns the first key in nested mappings that is no string: JSON would make it one, which may exist."""
    if isinstance(x, Mapping):
        other = next(((name,) for name in x if not isinstance(name, str)), None)
        return other or next(filter(None, map(_find_other_key, x.values())), None)
    return next(filter(None, map(_find_other_key, x)), None) if isinstance(x, list | tuple) else None


def open_saved(path: pathlib.Path) -> tuple[SavedCache, dict[str, np.ndarray]]:
    """Returns a file's description and its tensors: memory-mapped, verified, and matching the config."""
    tensors, fields, header = safetensors.read_all(path)
    if fields.get("format") != FORMAT:
        raise CacheFileError(f"{path} is a safetensors file, but not of a cache: jaxkv.save writes those.")
    if fields.get("version") not in KNOWN:
        raise CacheFileError(
            f"{path} is in version {fields.get('version')} of the format, but this jaxkv knows versions up to "
            f"{VERSION}: install a newer one."
        )
    expected = tensors.pop(CHECKSUMS, np.zeros(0, np.uint32)).tolist()
    if len(expected) != len(tensors) + 1:
        raise DamagedFile(f"{path} is damaged: it has {len(expected)} checksums for {len(tensors)} tensors. {AGAIN}")
    if expected[0] != zlib.crc32(header):
        raise DamagedFile(f"{path} is damaged: its header is not what its checksum says. {AGAIN}")
    for (name, tensor), checksum in zip(tensors.items(), expected[1:], strict=True):
        if _checksum(tensor) != checksum:
            raise DamagedFile(f"{path} is damaged: tensor {name} is not what its checksum says. {AGAIN}")
    return parse_saved(path, fields, tensors), tensors


def parse_saved(path: Any, fields: Mapping[str, str], tensors: dict[str, np.ndarray]) -> SavedCache:
    """Returns the description of a saved cache from the header's fields. Raises CacheFileError unless the tensors match
    its config; it names `path`, where they come from."""
    try:
        saved = _parse_saved(fields, tensors)
        _check_tensors(saved, tensors)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise CacheFileError(
            f"{path} holds a cache that this version of jaxkv cannot make ({error}): load it with the version that "
            "saved it."
        ) from error
    return saved


def _parse_saved(fields: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> SavedCache:
    cache, metadata = json.loads(fields["cache"]), json.loads(fields["metadata"])
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is no object")
    if tensors["lengths"].dtype != np.int32 or tensors["lengths"].ndim != 1:
        raise ValueError("its lengths are no list of integers")
    return SavedCache(
        config=parse_config(cache["config"]),
        lengths=tuple(tensors["lengths"].tolist()),
        model=fields.get("model"),
        metadata=metadata,
        block_size=integer("the size of its blocks", cache["size"], least=1),
        groups=_tuples(cache["groups"]),
    )


def _checksum(tensor: np.ndarray) -> int:
    data = safetensors.as_bytes(tensor)
    checksum = 0
    for begin in range(0, len(data), CHUNK):  # pages of a mapped file can be released as soon as they are read
        checksum = zlib.crc32(data[begin : begin + CHUNK], checksum)
    return checksum


def _check_tensors(saved: SavedCache, tensors: dict[str, np.ndarray]) -> None:
    """Raises ValueError unless names, shapes and contents of the tensors match the config."""
    config, lengths = saved.config, tensors["lengths"]
    if saved.groups != config.groups:
        raise ValueError(f"its layers form the groups {saved.groups}, not {config.groups}")
    most = MOST_TOKENS if config.is_endless else config.max_seq_len
    if (lengths < 0).any() or (lengths > most).any() or len(lengths) > config.max_seqs:
        raise ValueError(f"its lengths do not fit {config.max_seqs} rows of up to {config.max_seq_len} tokens")
    if config.max_seqs > max(len(lengths), config.num_blocks, MOST_EMPTY_ROWS):
        raise ValueError(f"it has {config.max_seqs} rows, but {config.num_blocks} blocks")
    expected = {"lengths"} | {f"tables.{g}" for g in range(len(config.groups))}
    for g, layers in enumerate(config.groups):
        tables, held = tensors[f"tables.{g}"], lengths
        if config.group_evicts[g] is not None:
            held = _read_held(tensors[f"held.{g}"], np.tile(lengths, config.group_heads[g]), f"held.{g}")
            expected.add(f"held.{g}")
        width = -(-int(held.max(initial=0)) // saved.block_size)
        if tables.shape != (len(held), width):
            raise ValueError(f"tables.{g} {tables.shape} does not hold the rows")
        column = np.arange(width)
        first = config.first_retained_block(g, held) * config.block_size // saved.block_size
        end = -(-held // saved.block_size)
        kept = (column >= first[:, None]) | (column < config.group_sink_blocks[g])
        if ((tables != 0) != (kept & (column < end[:, None]))).any():
            raise ValueError(f"tables.{g} does not hold the tokens of the rows")
        for i in layers:
            for name, (heads, minor) in stored_tensors(config, i).items():
                blocks = tensors[name]
                if blocks.shape[1:] != (*heads, config.layers[i].count_entries(saved.block_size), *minor):
                    raise ValueError(f"{name} {blocks.shape} is not what its config says")
                if tables.min(initial=0) < 0 or tables.max(initial=0) > len(blocks):
                    raise ValueError(f"tables.{g} names blocks that are not there")
                expected.add(name)
    for (i, name), array in stored_states(config).items():
        tensor = tensors[f"state.{i}.{name}"]
        if tensor.shape != (len(lengths), *array.shape):
            raise ValueError(f"state.{i}.{name} {tensor.shape} is not what its config says")
        expected.add(f"state.{i}.{name}")
    if SNAPSHOTS in tensors:
        expected |= _check_snapshots(saved, tensors)
    if unknown := sorted(tensors.keys() - expected):
        raise ValueError(f"it has tensors that no cache has: {show(unknown)}")
    for name, tensor in tensors.items():
        if tensor.dtype != _dtype(config, name):
            raise ValueError(f"{name} is in {tensor.dtype}")


def _check_snapshots(saved: SavedCache, tensors: dict[str, np.ndarray]) -> set[str]:
    """Returns the names of the tensors of snapshots. Raises ValueError unless they match the config."""
    table, every = tensors[SNAPSHOTS], saved.config.snapshot_every
    if (
        every is None
        or table.ndim != 2
        or table.dtype != np.int32
        or table.shape != (len(saved.lengths), saved.config.row_snapshots)
    ):
        raise ValueError(f"{SNAPSHOTS} {table.shape} does not hold the rows")
    names = {f"snapshot.{i}.{name}": array.shape for (i, name), array in stored_states(saved.config).items()}
    for name, shape in names.items():
        if tensors[name].shape[1:] != shape:
            raise ValueError(f"{name} {tensors[name].shape} is not what its config says")
        if table.min(initial=0) < 0 or table.max(initial=0) > len(tensors[name]):
            raise ValueError(f"{SNAPSHOTS} names states that are not there")
    behind = (np.arange(table.shape[1]) + 1) * every > np.array(saved.lengths, np.int64)[:, None]
    if table[behind].any():
        raise ValueError(f"{SNAPSHOTS} has states behind the rows")
    return {SNAPSHOTS, *names}


def _read_held(both: np.ndarray, lengths: np.ndarray, name: str) -> np.ndarray:
    """Checks and returns the tokens that the rows of a layer that evicts hold, out of `lengths`. Raises ValueError."""
    if both.shape != (2, len(lengths)) or both.dtype != np.int32:
        raise ValueError(f"{name} {both.shape} does not speak of the rows")
    held, thinned = both
    if ((held < 0) | (held > lengths) | (thinned < 0) | (thinned > held)).any() or thinned[held == lengths].any():
        raise ValueError(f"{name} holds other tokens than the rows have")
    return held


def _dtype(config: CacheConfig, name: str) -> np.dtype:
    what, _, index = name.partition(".")
    if what in ("state", "snapshot"):
        layer, _, array = index.partition(".")
        return jnp.dtype(stored_states(config)[int(layer), array].dtype)
    if what not in BLOCK_TENSORS:
        return np.dtype(np.int32)
    kind = config.index_kind(int(index)) if what.startswith("index") else config.kind(int(index))
    return kind.scale_dtype if what.endswith("scale") else kind.storage_dtype


BLOCK_TENSORS = ("layer", "scale", "index", "index_scale")
Axes = tuple[tuple[int, int], tuple[int, ...]]


def stored_tensors(config: CacheConfig, layer: int) -> dict[str, Axes]:
    """Returns a layer's tensors by name, in the order of a pool's `tokens`: the axes between their blocks and
    block_size, and those that follow."""
    kind, found, heads = config.kind(layer), config.layers[layer], config.stored_heads(layer)
    tensors: dict[str, Axes] = {f"layer.{layer}": (heads, (kind.stored_dim(found.row_dim),))}
    if kind.is_quantized:
        tensors[f"scale.{layer}"] = heads, config.scale_axes(layer)
    if found.index_dim is not None:
        tensors[f"index.{layer}"] = (1, 1), (found.index_dim,)
        if config.index_kind(layer).is_quantized:
            tensors[f"index_scale.{layer}"] = (1, 1), ()
    return tensors


def stored_states(config: CacheConfig) -> dict[tuple[int, str], StateArray]:
    """Returns the arrays of the recurrent layers' states, by layer and name."""
    return {(i, array.name): array for i in config.recurrent_layers for array in config.layers[i].states or ()}


def _render(config: CacheConfig) -> dict[str, Any]:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    layers = [leave_out_unset(layer_facts(config, i)) for i in range(len(config.layers))]
    for layer, found in zip(layers, config.layers, strict=True):
        if found.bounds:  # the file does not hold the bounds: loading computes them
            layer["bounds"] = True
    for i in pool_layers(config):
        if config.kind(i).revision > 1:
            layers[i]["revision"] = config.kind(i).revision
    if not config.join_kv:  # so that older readers, which do not know the field, read the file too
        del fields["join_kv"]
    for name in ("snapshot_every", "residual_length"):
        if fields[name] is None:
            del fields[name]
    return fields | {"layers": layers, "dtype": kind_of(config.dtype, "dtype").name}


def parse_config(fields: dict[str, Any]) -> CacheConfig:
    """Returns the config that a header states. Raises ValueError, or others for a header that is wrong."""
    if not isinstance(fields, dict) or not all(isinstance(layer, dict) for layer in fields["layers"]):
        raise ValueError("its config is none")
    fields = {name: _tuples(value) for name, value in fields.items()}
    layers: list[LayerConfig] = []
    for layer in map(dict, fields["layers"]):
        # A layer that names the cache's own dtype equals a layer that names none; a layer that shares must name none.
        # The same holds for the rotation of heads.
        kind = kind_of(layer["dtype"], "its dtype")
        shares = layer["shares_with"] is not None
        if layer.pop("revision", 1) != kind.revision and not shares and layer.get("states") is None:
            raise ValueError(
                f"layer {len(layers)} is stored in {kind.name} of another version, whose bits mean other numbers: "
                "compute its tokens anew"
            )
        own = layer["dtype"] != fields["dtype"] and not shares
        rotate = layer.get("rotate", False)
        rotate = None if shares or layer.get("rank") or layer.get("v_head_dim") or rotate == kind.rotates else rotate
        layers.append(LayerConfig(**layer | {"dtype": layer["dtype"] if own else None, "rotate": rotate}))
    return CacheConfig(**{"join_kv": False} | fields | {"layers": layers})


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
