"""A model and its cache divided over the devices of a mesh, as `models.load(folder, mesh=)` and `init(mesh=)` do."""

import dataclasses

from jaxkv._core.layer import LayerConfig
from jaxkv._core.numbers import integer
from jaxkv._core.shards import num_parts
from jaxkv.models.config import DecoderConfig
from jaxkv.models.partition import AXIS

MOST = 1 << 20


@dataclasses.dataclass(frozen=True)
class Devices:
    """So many devices, of which each has its part of the heads, the MLPs' width and the vocabulary."""

    count: int = 1

    def __post_init__(self):
        object.__setattr__(self, "count", integer("--devices", self.count, least=1, most=MOST))

    def layer(self, layer: LayerConfig) -> LayerConfig:
        """What each device keeps of a layer. Raises ValueError for heads that cannot be divided."""
        parts = num_parts(layer.num_kv_heads, self.count, AXIS)
        return dataclasses.replace(layer, num_kv_heads=layer.num_kv_heads // parts)

    def weights(self, config: DecoderConfig, total: int) -> int:
        """Bytes of the weights on each device, of `total` bytes."""
        from jaxkv.models.loader import count_parameters

        return (
            total if self.count == 1 else -(-total * count_parameters(config, self.count) // count_parameters(config))
        )

    def moved(self, config: DecoderConfig, rows: int, itemsize: int) -> int:
        """The most bytes that each device sends in a decode step of so many rows.

        A layer has two sums over devices of `[rows, embed_dim]`, behind attention and behind the MLP, and there is one
        more behind the embedding; in a ring each sends `2 (n - 1) / n` of what is summed. The logits, in float32, are
        brought together once.
        """
        sums = (2 * config.num_layers + 1) * rows * config.embed_dim * itemsize
        return (2 * sums + rows * config.vocab_size * 4) * (self.count - 1) // self.count
