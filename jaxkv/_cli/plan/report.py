"""The results of `plan`."""

import dataclasses
import functools
from typing import Any, NamedTuple

from jaxkv._cli.plan.capacity import Plan
from jaxkv._cli.plan.chips import Chip, has_kernel
from jaxkv._cli.plan.decode_step import DecodeStep, decode_step
from jaxkv._cli.plan.devices import Devices


class DeviceMemory(NamedTuple):
    """Memory of a device in bytes, and its use."""

    total: int
    weights: int
    source: str  # source of the weights' size
    rest: int

    @property
    def cache(self) -> int:
        return self.total - self.weights - self.rest


class Option(NamedTuple):
    """A block size, dtypes of equal cost, and the plan of each data-parallel group; None: does not fit."""

    block_size: int
    dtypes: list[str]
    plan: Plan | None


class AskedRows(NamedTuple):
    """Bytes on each device of the requested rows and tokens in a dtype."""

    rows: int
    length: int
    dtype: str
    bytes: int


class Needs(NamedTuple):
    """Bytes on each of `devices` devices, of weights and of rows, whatever memory there is."""

    weights: int
    source: str  # source of the weights' size
    devices: int
    asked: list[AskedRows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All results of a plan. asked: memory of the requested rows, by dtype."""

    model: Any  # the model's DecoderConfig
    memory: DeviceMemory
    max_seq_len: int
    step_tokens: int
    is_told: bool  # the expected lengths were given
    options: list[Option]
    devices: Devices
    chip: Chip | None
    asked: list[AskedRows] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def best(self) -> Plan:
        """The plan to start from: the default block size if it fits, in the first dtype that a kernel of the chip reads
        and in which the requested rows fit."""
        fitting = [option for option in self.options if option.plan]
        enough = {asked.dtype for asked in self.asked if asked.bytes <= self.memory.cache}
        read = [option for option in fitting if self.has_kernel(option.dtypes[0], option.block_size)] or fitting
        good = [option for option in read if option.dtypes[0] in enough] or read
        usual = (x for x in good if x.plan and x.block_size == x.plan.config.default_block_size)
        first = next(usual, good[0])
        assert first.plan is not None
        return first.plan

    def has_kernel(self, dtype: str, block_size: int | None = None) -> bool:
        """Tells whether a kernel of the chip reads this dtype in all layers, in blocks of this size, or of a fitting
        one; True without a chip."""
        return has_kernel(self.chip, self.model.layer_configs, dtype, block_size)

    @functools.cached_property
    def step(self) -> DecodeStep:
        """Decode step of all rows."""
        return decode_step(self.model, self.devices, self.best, self.memory.weights)

    @property
    def hosts(self) -> int | None:
        """Number of hosts that have the devices; None for a chip that is not named."""
        return None if self.chip is None else -(-self.devices.count // self.chip.host)

    @property
    def _whole(self) -> Any:
        """Config with all heads, including those of other devices."""
        config = self.best.config
        return config.replace(layers=self.model.layer_configs, group_blocks=config.group_blocks)

    @property
    def _size(self) -> dict[str, Any]:
        """Arguments that set the size of the cache on all devices together."""
        config = self.best.config
        if self.devices.count == 1:
            return {"memory_bytes": self.memory.cache}
        if self.devices.data == 1:
            return {"memory_bytes": self._whole.bytes}
        return {"group_blocks": [blocks * self.devices.data for blocks in config.group_blocks]}

    @property
    def suggestion(self) -> dict[str, Any]:
        """Arguments of `CacheConfig.from_model`."""
        config = self.best.config
        fields = {
            "max_seqs": max(1, min(config.max_seqs, self.best.rows)) * self.devices.data,
            "max_seq_len": self.max_seq_len if self.best.full_rows else min(self.max_seq_len, self.best.tokens),
            **self._size,
            "block_size": config.block_size,
            "dtype": str(config.dtype),
        }
        if config.residual_length is not None:
            fields["residual_length"] = config.residual_length
        if len(config.groups) > 1 and "memory_bytes" in fields:
            fields["step_tokens"] = max(self.step_tokens, config.max_seqs)
        if config.head_dim_multiple > 1:
            fields["head_dim_multiple"] = config.head_dim_multiple
        if any(config.form(i).joins for i in range(config.num_layers)):
            in_pairs = all(self._whole.pairs_divide(i, self.devices.tensor) for i in range(config.num_layers))
            fields["join_kv"] = True if in_pairs else "head"
        return fields


def device_contents(report: Report) -> dict[str, int]:
    """Returns the bytes that each device holds."""
    found, context = report.best, report.devices.context
    return {
        "weights": report.memory.weights,
        "cache": report.devices.bytes(found.config),
        "rows": found.rows,
        "tokens": found.tokens // context,
    }


def count_facts(found: Plan, devices: Devices) -> dict[str, Any]:
    return {
        "bytes_per_token": found.bytes_per_token,
        "bytes_per_row": found.bytes_per_row,
        "marginal_bytes_per_token": found.marginal_bytes,
        "group_blocks": [blocks * devices.data for blocks in found.config.group_blocks],
        "tokens": found.tokens * devices.data,
        "rows": found.rows * devices.data,
        "full_rows": found.full_rows * devices.data,
        "waste": found.waste,
        "bytes": devices.bytes(found.config),
    }
