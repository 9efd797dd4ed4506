"""Shards a model and its cache over the devices of a mesh, as `models.load(folder, mesh=)` and `init(mesh=)` do."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from jax.sharding import AbstractMesh

from jaxkv._core.cache.init import partition_specs
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import integer, show
from jaxkv._core.state.sharding import count_shards
from jaxkv.models.config import DecoderConfig
from jaxkv.models.partition import AXIS

MOST = 1 << 20
DIMENSIONS = ("tensor", "data", "context")


@dataclasses.dataclass(frozen=True)
class Devices:
    """The shape of a mesh.

    Fields:
      tensor: number of devices over which heads, MLP widths and the vocabulary are sharded.
      data: number of data-parallel groups of rows, each with its own blocks, block tables and whole model.
      context: number of devices over which the tokens of every block are sharded.
    """

    tensor: int = 1
    data: int = 1
    context: int = 1

    def __post_init__(self):
        shape = dict(zip(DIMENSIONS, (self.tensor, self.data, self.context), strict=True))
        for name, number in shape.items():
            what = "--devices" if self.data == self.context == 1 else f"{name} in --devices"
            object.__setattr__(self, name, integer(what, number, least=1, most=MOST))
        integer("All devices of --devices together", self.count, most=MOST)

    @classmethod
    def read(cls, text: str) -> "Devices":
        """Parses `8`, `8x16` or `8x4x2`. Raises ValueError.

        >>> Devices.read("8x4x2")
        Devices(tensor=8, data=4, context=2)
        """
        numbers = text.strip().lower().split("x")
        if len(numbers) > len(DIMENSIONS) or not all(re.fullmatch(r"-?[0-9]{1,99}", number) for number in numbers):
            raise ValueError(
                "--devices must be a number, or numbers for tensor x data x context, such as 8, 8x16 or 8x4x2, not "
                f"{show(text)}."
            )
        return cls(*map(int, numbers))

    def __str__(self) -> str:
        return f"{self.tensor}x{self.data}x{self.context}"

    @property
    def count(self) -> int:
        return self.tensor * self.data * self.context

    @property
    def mesh(self) -> dict[str, int]:
        """Names and sizes of the axes that shard anything."""
        axes = {"data": self.data, AXIS: self.tensor, "context": self.context}
        return {name: size for name, size in axes.items() if size > 1}

    @property
    def axes(self) -> dict[str, str]:
        """The axis arguments of `jaxkv.init`."""
        return {name: axis for name, axis in (("context", "context"), ("rows", "data")) if axis in self.mesh}

    def layer(self, layer: LayerConfig) -> LayerConfig:
        """Returns the layer that each device keeps. Raises ValueError for heads that cannot be sharded."""
        if layer.states is not None:  # divided where its first axis can be
            return LayerConfig.recurrent(
                **{
                    name: ((n // (1 if n % self.tensor else self.tensor), *rest), dtype)
                    for name, (n, *rest), dtype in layer.states
                }
            )
        num_shards = count_shards(layer.num_kv_heads, self.tensor, AXIS)
        return dataclasses.replace(layer, num_kv_heads=layer.num_kv_heads // num_shards)

    def bytes(self, config: CacheConfig) -> int:
        """Returns a device's bytes of a cache of `context` devices: its shard of the blocks, and all states."""
        states = (config.num_state_slots + 1) * config.bytes_per_state
        return (config.bytes - states) // self.context + states

    def weights(self, config: DecoderConfig, total: int) -> int:
        """Returns the bytes of the weights on each device, out of `total` bytes."""
        from jaxkv.models.checkpoints.parameter_counts import count_parameters

        if self.tensor == 1:
            return total
        return -(-total * count_parameters(config, self.tensor) // count_parameters(config))

    def rows(self, max_seqs: int | None) -> int | None:
        """Returns the rows of each data-parallel group. Raises ValueError if `max_seqs` cannot be divided."""
        if max_seqs is None:
            return None
        if integer("--max-seqs", max_seqs, least=1) % self.data:
            why = "they are fewer" if max_seqs < self.data else f"{-(-max_seqs // self.data) * self.data} could be"
            raise ValueError(
                f"The {max_seqs} rows of --max-seqs cannot be divided among {self.data} parts of the data: {why}."
            )
        return max_seqs // self.data

    def check(self, layers: Any, block_size: int) -> None:
        """Raises ValueError, as `jaxkv.init` does, for layers or blocks that cannot be sharded."""
        if not self.mesh:
            return
        config = CacheConfig(
            layers=layers,
            max_seqs=self.data,
            max_seq_len=block_size,
            num_blocks=self.data,
            block_size=block_size,
            head_dim_multiple=1,
        )
        mesh = AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh))
        partition_specs(config, mesh, AXIS if AXIS in self.mesh else None, **self.axes)


def shapes_of(count: int, config: DecoderConfig) -> Iterator[Devices]:
    """Yields the meshes of `count` devices that shard query heads evenly, at most one device a head."""
    for tensor in _divisors(math.gcd(count, *config.query_heads)):
        for context in _divisors(count // tensor):
            yield Devices(tensor, count // tensor // context, context)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
