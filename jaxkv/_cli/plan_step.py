"""What a decode step asks of each device, counted before anything is loaded: bytes read and sent, and operations.

A step takes at least `max(bytes read / memory's rate, operations / peak) + bytes sent / the interconnect's rate`: while
it computes it can read, but a layer's sum or gather waits for what is computed, and what comes after waits for it. How
long a first byte is on its way does not count. With more devices a step comes further from that.
"""

import dataclasses
import math
from typing import Literal

from jaxkv._cli.chips import Chip, Link
from jaxkv._cli.memory_plan import Plan
from jaxkv._cli.plan_devices import Devices
from jaxkv.models.config import DecoderConfig

ITEMSIZE = 2  # of what is computed with: bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """So many of the same in a step.

    Fields:
      kind: "all-reduce", a sum, or "all-gather".
      over: "tensor" or "context"; devices: how many of them take part.
      count: in a step.
      size: bytes of what is summed, or of a device's own part of what is gathered.
    """

    kind: Literal["all-reduce", "all-gather"]
    over: str
    devices: int
    count: int
    size: int

    @property
    def sent(self) -> int:
        """Bytes that each device sends, the least that do: in a ring, say."""
        others = self.devices - 1
        return self.count * (
            self.size * others if self.kind == "all-gather" else 2 * self.size * others // self.devices
        )

    def sent_over(self, chip: Chip, taken: int = 1) -> dict[Link, float]:
        """The same by what it is sent over. Boxes and pods are filled first, `taken` devices by another axis already;
        between those that are full each byte goes once, and the devices of a box share that work."""
        room = max(chip.reach // taken, 1)
        near = self.devices if self.devices <= room else math.gcd(self.devices, room)
        outside = self.sent * (self.devices // near - 1) / (self.devices - 1)
        return {link: sent for link, sent in ((chip.link, self.sent - outside), (chip.network, outside)) if sent}


def collectives(config: DecoderConfig, devices: Devices, rows: int, itemsize: int = ITEMSIZE) -> list[Collective]:
    """Those of a decode step in which each part of the data has so many rows, and computes with so many bytes a number.

    Over `tensor` a layer has two sums of `[rows, embed_dim]`, behind attention and behind the MLP, and there is one
    more behind the embedding; the logits, in float32, are brought together once. What cannot be divided is whole on
    each device, and needs no sum. Over `context` a layer gathers a float32 output and LSE for every query head. Over
    `data` nothing is said.
    """
    by_heads, by_vocab = config.num_heads % devices.tensor == 0, config.vocab_size % devices.tensor == 0
    experts = config.expert_layers or (False,) * config.num_layers
    own, shared = (config.experts.mlp_dim, config.experts.shared_dim) if config.experts else (0, 0)
    divided = [(own, shared) if is_expert else (config.mlp_dim,) for is_expert in experts]
    behind = sum(any(n > 0 and n % devices.tensor == 0 for n in widths) for widths in divided)
    sums = config.num_layers * by_heads + behind + by_vocab
    heads = config.num_heads // (devices.tensor if by_heads else 1)
    output = config.head_dim if config.latent is None else config.latent.rank
    logits = rows * 4 * config.vocab_size // devices.tensor
    over_tensor, over_context = (dict(over=name, devices=getattr(devices, name)) for name in ("tensor", "context"))
    all_kinds = (
        Collective(kind="all-reduce", count=sums, size=rows * config.embed_dim * itemsize, **over_tensor),
        Collective(kind="all-gather", count=int(by_vocab), size=logits, **over_tensor),
        Collective(kind="all-gather", count=config.num_layers, size=rows * heads * (output + 1) * 4, **over_context),
    )
    return [x for x in all_kinds if x.devices > 1 and x.count and x.size]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """What each device does in a step that adds a token to every row.

    Fields:
      rows: of the device's part of the data.
      read_weights, read_cache: bytes. An expert is read if a token comes to it, where all are as likely.
      flops: operations of matrix products.
      collectives: what is sent between devices.
      devices: of which it is one.
    """

    rows: int
    read_weights: float
    read_cache: float
    flops: float
    collectives: list[Collective]
    devices: Devices

    @property
    def sent(self) -> int:
        """Bytes."""
        return sum(x.sent for x in self.collectives)

    def sent_over(self, chip: Chip) -> list[tuple[Collective, Link, float]]:
        """By collective and by what it goes over: tensor parallel devices are neighbours, contexts go around them."""
        taken = {"tensor": 1, "context": self.devices.tensor}
        return [(x, *found) for x in self.collectives for found in x.sent_over(chip, taken[x.over]).items()]

    def seconds(self, chip: Chip) -> dict[str, float]:
        """The bound's parts: "read", "compute" and "send"; and all of it, "step"."""
        read, compute = (self.read_weights + self.read_cache) / chip.memory_rate, self.flops / chip.peak
        send = sum(sent / link.rate for _, link, sent in self.sent_over(chip))
        return {"read": read, "compute": compute, "send": send, "step": max(read, compute) + send}

    def tokens_per_second(self, chip: Chip) -> float:
        """The most that all devices can make together."""
        return self.rows * self.devices.data / self.seconds(chip)["step"]


def decode_step(config: DecoderConfig, devices: Devices, found: Plan, weights: int) -> DecodeStep:
    """Of all the rows that a plan of one part of the data has room for, each with `mean_len` tokens.

    Args:
      found: the plan for what each device has of a layer's heads, its blocks whole.
      weights: their bytes on a device.
    """
    from jaxkv.models.loader import count_parameters

    rows, cache = found.rows, found.config
    count = count_parameters(config, devices.tensor)
    table = 0 if config.tie_embeddings else config.vocab_size * config.embed_dim
    table //= devices.tensor if config.vocab_size % devices.tensor == 0 else 1
    idle = unread = 0.0  # of experts: those that a token does not go to, and those that none does
    if config.experts is not None:
        experts = config.experts
        width = experts.mlp_dim // (devices.tensor if experts.mlp_dim % devices.tensor == 0 else 1)
        every = 3 * config.embed_dim * width * experts.count * sum(config.expert_layers)
        share = experts.per_token / experts.count
        idle, unread = every * (1 - share), every * (1 - share) ** max(rows, 1)
    seen = [found.mean_len if reach is None else min(found.mean_len, reach) for reach in cache.group_reaches]
    of_token = [cache.bytes_per_group_block(group) / cache.block_size for group in range(len(cache.groups))]
    widths = 2 * config.head_dim if config.latent is None else config.latent.width + config.latent.rank
    heads = config.num_heads // (devices.tensor if config.num_heads % devices.tensor == 0 else 1)
    attended = sum(len(layers) * tokens for layers, tokens in zip(cache.groups, seen, strict=True)) / devices.context
    return DecodeStep(
        rows=rows,
        read_weights=weights * (count - table - unread) / count,
        read_cache=rows * sum(n * tokens for n, tokens in zip(of_token, seen, strict=True)) / devices.context,
        flops=2 * rows * (count - table - idle + heads * widths * attended),
        collectives=collectives(config, devices, rows),
        devices=devices,
    )
