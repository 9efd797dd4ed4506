"""Counts the bytes read and sent and the operations of a decode step on each device, without loading the model.

A step takes at least `max(bytes read / memory's rate, operations / peak) + bytes sent / the interconnect's rate`.
Reading overlaps with computation, but a layer's all-reduce or all-gather waits for its inputs, and the next layer waits
for its result. Latency is not counted; with more devices a step is further from this bound.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from jaxkv._cli.plan.capacity import Plan
from jaxkv._cli.plan.chips import Chip, Link
from jaxkv._cli.plan.devices import Devices
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv.models.config import CompressorConfig, DecoderConfig, IndexConfig

ITEMSIZE = 2  # of computation: bfloat16
Compressors = Mapping[int, CompressorConfig]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """Equal collectives of a step.

    Fields:
      kind: "all-reduce", a sum, or "all-gather".
      over: "tensor" or "context"; devices: number of devices that take part.
      count: number of such collectives in a step.
      size: bytes of the summed array, or of a device's own shard of the gathered array.
    """

    kind: Literal["all-reduce", "all-gather"]
    over: str
    devices: int
    count: int
    size: int

    @property
    def sent(self) -> int:
        """Minimum bytes that each device sends, as in a ring."""
        others = self.devices - 1
        return self.count * (
            self.size * others if self.kind == "all-gather" else 2 * self.size * others // self.devices
        )

    def sent_over(self, chip: Chip, taken: int = 1) -> dict[Link, float]:
        """Returns the bytes sent over each link. Hosts and pods are filled first, `taken` devices by another axis
        already. Between full ones each byte is sent once, and the devices of a host share that work."""
        room = max(chip.reach // taken, 1)
        near = self.devices if self.devices <= room else math.gcd(self.devices, room)
        outside = self.sent * (self.devices // near - 1) / (self.devices - 1)
        return {link: sent for link, sent in ((chip.link, self.sent - outside), (chip.network, outside)) if sent}


def divides_heads(config: DecoderConfig, devices: Devices) -> bool:
    """Tells whether query heads can be divided evenly, in every layer."""
    return all(heads % devices.tensor == 0 for heads in config.query_heads)


def count_heads(config: DecoderConfig, devices: Devices) -> int:
    """Returns the query heads of a layer on a device; of layers that differ, the mean."""
    heads = sum(config.query_heads) // len(config.query_heads)
    return heads // devices.tensor if divides_heads(config, devices) else heads


def collectives(config: DecoderConfig, devices: Devices, rows: int, itemsize: int = ITEMSIZE) -> list[Collective]:
    """Returns the collectives of a decode step of `rows` rows a data-parallel group, with `itemsize` bytes a value.

    Over `tensor` a layer has two sums of `[rows, embed_dim]`, after attention or a mixer and after the MLP, and the
    embedding adds one more; the logits, in float32, are gathered once. Parameters that cannot be sharded are
    replicated, and need no sum. Over `context` a layer gathers a float32 output and LSE for every query head. Over
    `data` nothing is sent.
    """
    by_heads, by_vocab = divides_heads(config, devices), config.vocab_size % devices.tensor == 0
    experts = config.expert_layers or (False,) * config.num_layers
    own, shared = (config.experts.mlp_dim, config.experts.shared_dim) if config.experts else (0, 0)
    blocks = [config.block(i) for i in range(config.num_layers)]
    divided = [
        (own, shared) if is_expert else (config.mlp_dim,)
        for block, is_expert in zip(blocks, experts, strict=True) if block.mlp
    ]  # fmt: skip
    attending = sum(bool(block.attention) for block in blocks)
    outputs = [block.mixer.shapes(config.embed_dim)["out"] or (1,) for block in blocks if block.mixer]
    mixing = sum(shape[0] % devices.tensor == 0 for shape in outputs)
    behind = sum(any(n > 0 and n % devices.tensor == 0 for n in widths) for widths in divided)
    sums = attending * by_heads + mixing + behind + by_vocab
    heads = count_heads(config, devices)
    output = config.head_dim if config.latent is None else config.latent.rank
    logits = rows * 4 * config.vocab_size // devices.tensor
    over_tensor, over_context = (dict(over=name, devices=getattr(devices, name)) for name in ("tensor", "context"))
    all_kinds = (
        Collective(kind="all-reduce", count=sums, size=rows * config.embed_dim * itemsize, **over_tensor),
        Collective(kind="all-gather", count=int(by_vocab), size=logits, **over_tensor),
        Collective(kind="all-gather", count=attending, size=rows * heads * (output + 1) * 4, **over_context),
    )
    return [x for x in all_kinds if x.devices > 1 and x.count and x.size]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The work of each device in a step that adds a token to every row.

    Fields:
      rows: rows of the device's data-parallel group.
      read_weights, read_cache: bytes. An expert is read if a token is routed to it; all experts are equally likely.
      flops: operations of matrix products.
      collectives: collectives between devices.
      devices: the mesh.
    """

    rows: int
    read_weights: float
    read_cache: float
    flops: float
    collectives: list[Collective]
    devices: Devices

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return sum(x.sent for x in self.collectives)

    def sent_over(self, chip: Chip) -> list[tuple[Collective, Link, float]]:
        """Returns bytes by collective and link: tensor-parallel devices are neighbours, context goes around them."""
        taken = {"tensor": 1, "context": self.devices.tensor}
        return [(x, *found) for x in self.collectives for found in x.sent_over(chip, taken[x.over]).items()]

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Returns the terms of the bound, "read", "compute" and "send", and the total, "step"."""
        read, compute = (self.read_weights + self.read_cache) / chip.memory_rate, self.flops / chip.peak
        send = sum(sent / link.rate for _, link, sent in self.sent_over(chip))
        return {"read": read, "compute": compute, "send": send, "step": max(read, compute) + send}

    def tokens_per_second(self, chip: Chip) -> float:
        """Returns the upper bound of tokens/s of all devices together."""
        return self.rows * self.devices.data / self.seconds(chip)["step"]


def attention_work(
    cache: CacheConfig, length: float, index: IndexConfig | None = None, compressors: Compressors | None = None
) -> tuple[float, float, float]:
    """Returns for a row of `length` tokens the bytes that all layers read of the cache, those that read another's keys
    included, the products that a head computes with them, and those of all indexers.

    Args:
      index: of layers that choose tokens.
      compressors: by the index of the layer of their entries, behind which stands what these are made of.
    """
    read = computed = scored = 0.0
    compressors = compressors or {}
    for i, layer in enumerate(cache.layers[: cache.num_layers]):
        if (own := compressors.get(i)) is not None:
            entries, bytes_of_key = length / own.ratio, cache.bytes_per_block_read(i) / cache.block_slots(i)
            seen = entries if own.index is None else min(entries, own.index.top_k)
            read += bytes_of_key * seen + cache.index_bytes_per_block(i) / cache.block_slots(i) * entries
            scored += 0 if own.index is None else own.index.heads * own.index.dim * entries
            computed += (layer.head_dim + layer.value_dim) * seen
        elif (own := compressors.get(i - 1)) is not None:  # read when an entry is complete
            read += cache.bytes_per_block_read(i) / cache.block_size * own.window / own.ratio
        elif not layer.is_recurrent:
            reach = layer.retention.visible_tokens
            tokens = length if reach is None else min(length, reach)
            if index is not None:
                tokens = min(tokens, index.top_k)
            if index is not None and layer.index_dim is not None:
                read += cache.index_bytes_per_block(i) / cache.block_size * length
                scored += index.heads * index.dim * length
            read += cache.bytes_per_block_read(i) / cache.block_size * tokens
            if (residual := cache.residual_layer(i)) is not None:
                newest = min(tokens, cache.residual_length or 0)
                more = cache.bytes_per_block_read(residual) - cache.bytes_per_block_read(i)
                read += more / cache.block_size * newest
            computed += (layer.head_dim + layer.value_dim) * tokens
    return read, computed, scored


def find_compressors(config: DecoderConfig) -> Compressors:
    """Returns the compressors of a decoder's blocks by the index of the layer of their entries."""
    found = ((config.first_layer(i) + 1, config.block(i).compressor) for i in range(config.num_layers))
    return {layer: compressor for layer, compressor in found if compressor is not None}


def decode_step(config: DecoderConfig, devices: Devices, found: Plan, weights: int) -> DecodeStep:
    """Returns the decode step of all rows that a data-parallel group's plan holds, each with `mean_len` tokens.

    Args:
      found: the plan for each device's heads, with whole blocks.
      weights: bytes of the weights on a device.
    """
    from jaxkv.models.checkpoints.parameter_counts import count_parameters

    rows, cache = found.rows, found.config
    count = count_parameters(config, devices.tensor)
    table = 0 if config.tie_embeddings else config.vocab_size * config.embed_dim
    table //= devices.tensor if config.vocab_size % devices.tensor == 0 else 1
    if own := config.per_layer:  # of which a step reads a row of each token
        table += (
            own.vocab_size * own.dim * config.num_layers // (1 if own.vocab_size % devices.tensor else devices.tensor)
        )
    idle = unread = 0.0  # of experts: those that one token skips, and those that all tokens skip
    if config.experts is not None:
        experts = config.experts
        width = experts.mlp_dim // (devices.tensor if experts.mlp_dim % devices.tensor == 0 else 1)
        matrices, read = 3 if config.gated_mlp else 2, experts.latent_dim or config.embed_dim
        every = matrices * read * width * experts.count * sum(config.expert_layers)
        share = experts.per_token / experts.count
        idle, unread = every * (1 - share), every * (1 - share) ** max(rows, 1)
    heads = count_heads(config, devices)
    read_cache, attended, scored = attention_work(cache, found.mean_len, config.index, find_compressors(config))
    return DecodeStep(
        rows=rows,
        read_weights=weights * (count - table - unread) / count,
        read_cache=rows * (read_cache / devices.context + cache.bytes_per_state),
        flops=2 * rows * (count - table - idle + (heads * attended + scored) / devices.context),
        collectives=collectives(config, devices, rows),
        devices=devices,
    )
