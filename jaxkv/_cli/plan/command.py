"""`python -m jaxkv plan`: computes the capacity of a model's cache in a given memory, without loading the model."""

import argparse
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxkv._cli.plan import report_json, report_text
from jaxkv._cli.plan.capacity import BLOCK_SIZES, needed_bytes, plan
from jaxkv._cli.plan.chips import Chip, chip_named, has_kernel
from jaxkv._cli.plan.devices import Devices, shapes_of
from jaxkv._cli.plan.report import AskedRows, DeviceMemory, Needs, Option, Report, device_contents
from jaxkv._cli.plan.step_report import shapes_as_text, step_as_json
from jaxkv._core.cache.inspection import format_bytes
from jaxkv._core.config.block_size import HEAD_DIM_MULTIPLES, choose_block_size, kernel_platform
from jaxkv._core.config.cache_config import JOINING
from jaxkv._core.config.kv_packing import can_hold
from jaxkv._core.config.layer_config import STATE_DTYPES, LayerConfig, count_tokens_of_entries, kind_of
from jaxkv._core.config.validation import integer, real, show
from jaxkv._files.hub import find_model
from pallas_kernels.common.quantization import FORMATS, QUANTIZED

MOST_LENGTHS = 64 << 20  # bytes of a file of lengths
MOST_SHAPES = 12  # in a table; JSON lists all


def run(arguments: argparse.Namespace) -> int:
    from jaxkv.models.checkpoints.folder import is_config_file

    for size in arguments.block_size or ():
        integer("--block-size", size, least=1)
    integer("--step-tokens", arguments.step_tokens, least=1)
    if arguments.mean_len is not None:
        real("--mean-len", arguments.mean_len, above=0)
    if arguments.residual_length is not None:
        integer("--residual-length", arguments.residual_length, least=1)
        if not {*(arguments.dtype or QUANTIZED)} & {*QUANTIZED}:
            raise ValueError(
                f"--residual-length={arguments.residual_length} is for quantized layers: leave it out, or give --dtype "
                f"a quantized format, one of {', '.join(QUANTIZED)}."
            )
    if not is_config_file(arguments.model):  # which is enough
        arguments.model = find_model(arguments.model, weights=False)
    config, refused = _read_model(arguments.model)
    chip = None if arguments.chip is None else chip_named(arguments.chip)
    devices = Devices.read(arguments.devices)
    told = arguments.weights
    weights = _weights(arguments.model, config, refused) if told is None else (told, "as told")
    lengths = None if arguments.lengths is None else _lengths(arguments.lengths)
    planner = _Planner(arguments, config, chip, weights, lengths)
    if arguments.shapes:
        return _compare(planner, devices)
    if arguments.memory is None and chip is None:
        needs = planner.needs(devices, _kinds(arguments.dtype, config, chip))
        print(
            json.dumps(report_json.needs_as_json(needs), indent=1)
            if arguments.json
            else report_text.needs_as_text(needs)
        )
        return 0
    least = count_tokens_of_entries(config.layer_configs)
    every = [size for size in BLOCK_SIZES if size % least == 0] or [least]
    sizes = arguments.block_size or [size for size in every if size % devices.context == 0] or every[-1:]
    report = planner.report(devices, _kinds(arguments.dtype, config, chip), sizes)
    print(json.dumps(report_json.as_json(report), indent=1) if arguments.json else report_text.as_text(report))
    return 0


@dataclasses.dataclass(frozen=True)
class _Planner:
    """The inputs of a plan that do not depend on the mesh shape."""

    arguments: argparse.Namespace
    config: Any  # the model's
    chip: Chip | None
    weights: tuple[int, str]  # bytes, and the source of that figure
    lengths: list[int] | None

    def report(self, devices: Devices, kinds: list[list[str]], block_sizes: Sequence[int | None]) -> Report:
        """Returns the report of the plans that fit; size None is the default. Raises ValueError if nothing fits."""
        arguments, config, source, lengths = self.arguments, self.config, self.weights[1], self.lengths
        layers = [devices.layer(layer) for layer in config.layer_configs]
        total = arguments.memory if self.chip is None or arguments.memory is not None else self.chip.memory
        weights = devices.weights(config, self.weights[0])
        left = total - weights
        rest = max(0, left) // 10 if arguments.rest is None else arguments.rest
        if left - rest <= 0:
            also = f" and {format_bytes(rest)} of rest" if arguments.rest else ""
            raise ValueError(
                f"{format_bytes(total)} of memory do not hold {format_bytes(weights)} of weights ({source})"
                f"{also}: give more memory, or with --weights what they really take."
            )
        max_seq_len, multiple, join_kv = self.max_seq_len, self.head_dim_multiple, self.join_kv
        max_seqs, options, why = devices.rows(arguments.max_seqs), [], ""
        for dtypes in kinds:
            for asked in block_sizes:
                block_size = asked or self._default_size(dtypes[0], multiple, max_seqs, max_seq_len)
                try:
                    devices.check(config.layer_configs, block_size)
                    # Each device has a run of every block's tokens, and so a shard of a larger pool.
                    found = plan(
                        layers,
                        (left - rest) * devices.context,
                        max_seq_len=max_seq_len,
                        max_seqs=max_seqs,
                        mean_len=arguments.mean_len,
                        lengths=lengths,
                        step_tokens=arguments.step_tokens,
                        block_size=block_size,
                        dtype=dtypes[0],
                        head_dim_multiple=multiple,
                        join_kv=join_kv,
                        state_copies=devices.context,
                        **self._residual(dtypes[0]),
                    )
                except ValueError as error:
                    found, why = None, why or str(error)  # the first of several reasons
                options.append(Option(block_size, dtypes, found))
        if not any(option.plan for option in options):
            raise ValueError(why)
        return Report(
            model=config,
            memory=DeviceMemory(total, weights, source, rest),
            max_seq_len=max_seq_len,
            step_tokens=arguments.step_tokens,
            is_told=arguments.mean_len is not None or lengths is not None,
            options=options,
            devices=devices,
            chip=self.chip,
            asked=[] if arguments.max_seqs is None else self._ask(devices, layers, kinds, arguments.max_seqs),
        )

    def needs(self, devices: Devices, kinds: list[list[str]]) -> Needs:
        """Returns the memory that weights and rows need on each device, whatever it has."""
        layers = [devices.layer(layer) for layer in self.config.layer_configs]
        devices.rows(self.arguments.max_seqs)  # refuses rows that cannot be divided
        rows = devices.data if self.arguments.max_seqs is None else self.arguments.max_seqs
        weights = devices.weights(self.config, self.weights[0])
        return Needs(weights, self.weights[1], devices.count, self._ask(devices, layers, kinds, rows))

    @property
    def max_seq_len(self) -> int:
        if self.arguments.max_seq_len is not None:
            return self.arguments.max_seq_len
        return self.config.max_seq_len if self.lengths is None else max(self.lengths)

    @property
    def head_dim_multiple(self) -> int:
        if self.arguments.head_dim_multiple is not None:
            return self.arguments.head_dim_multiple
        return 1 if self.chip is None else HEAD_DIM_MULTIPLES[self.chip.platform]

    @property
    def join_kv(self) -> bool:
        return self.chip is not None and self.chip.platform in JOINING

    def _ask(
        self, devices: Devices, layers: Sequence[LayerConfig], kinds: list[list[str]], all_rows: int
    ) -> list[AskedRows]:
        """Returns the memory that so many rows need on each device, by dtype."""
        arguments, max_seq_len, multiple = self.arguments, self.max_seq_len, self.head_dim_multiple
        length = arguments.mean_len if self.lengths is None else sum(self.lengths) / len(self.lengths)
        length = max_seq_len if length is None else min(math.ceil(length), max_seq_len)
        rows, said = all_rows // devices.data, (arguments.block_size or [None])[0]
        return [
            AskedRows(all_rows, length, dtypes[0], needed_bytes(
                layers, rows, length, max_seq_len=max_seq_len, step_tokens=arguments.step_tokens,
                block_size=said or self._default_size(dtypes[0], multiple, rows, max_seq_len), dtype=dtypes[0],
                head_dim_multiple=multiple, join_kv=self.join_kv, state_copies=devices.context,
                **self._residual(dtypes[0]),
            ) // devices.context)
            for dtypes in kinds
            if arguments.dtype is not None or FORMATS[dtypes[0]].bytes_per_element <= 2
        ]  # fmt: skip

    def _residual(self, dtype: str) -> dict[str, Any]:
        length = self.arguments.residual_length
        return {"residual_length": length} if length is not None and FORMATS[dtype].is_quantized else {}

    def _default_size(self, dtype: str, head_dim_multiple: int, max_seqs: int | None, max_seq_len: int) -> int:
        kinds = [kind_of(dtype, "--dtype")]
        size = choose_block_size(kernel_platform(head_dim_multiple), kinds, max_seqs or 1, max_seq_len)
        return math.lcm(size, count_tokens_of_entries(self.config.layer_configs))


def _compare(planner: _Planner, devices: Devices) -> int:
    """Prints the decode step of each mesh shape with this number of devices."""
    chip, arguments = planner.chip, planner.arguments
    if chip is None:
        raise ValueError("--shapes compares how long a decode step takes at least: say where with --chip.")
    if devices.count != devices.tensor:
        raise ValueError(f"--shapes takes a number of --devices, {devices.count}, not one of its shapes, {devices}.")
    found, why = [], ""
    for shape in shapes_of(devices.count, planner.config):
        try:
            report = planner.report(
                shape, _kinds(arguments.dtype, planner.config, chip)[:1], arguments.block_size or (None,)
            )
            found.append((device_contents(report), report.step))
        except ValueError as error:
            why = str(error)
    if not found:
        raise ValueError(why)
    found.sort(key=lambda shape: -shape[1].tokens_per_second(chip))
    if not arguments.json:
        print(shapes_as_text(found[:MOST_SHAPES], chip))
        return 0
    shapes = [dataclasses.asdict(step.devices) | {"each_device": contents, "step": step_as_json(step, chip)}
              for contents, step in found]  # fmt: skip
    print(json.dumps({"chip": dataclasses.asdict(chip), "shapes": shapes}, indent=1))
    return 0


def _lengths(file: pathlib.Path) -> list[int]:
    """Reads the numbers in a file, with any separators."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a file: --lengths takes one with the lengths of sequences.")
    if file.stat().st_size > MOST_LENGTHS:
        raise ValueError(f"{file} has {file.stat().st_size} bytes: a sample of the lengths, a few thousand, is enough.")
    words = [word for word in re.split(r"[\s,;\[\]]+", file.read_text(encoding="utf-8", errors="replace")) if word]
    wrong = next((word for word in words if not re.fullmatch(r"[0-9]{1,18}", word)), None)
    if wrong is not None or not words:
        what = f"has {show(wrong)} in it" if wrong is not None else "is empty"
        raise ValueError(f"{file} must have whole numbers, the lengths of sequences in tokens, but {what}.")
    return [int(word) for word in words]


def _kinds(names: list[str] | None, config: Any, chip: Chip | None) -> list[list[str]]:
    """Groups the dtypes that take the same memory. Unless they are named, those that cannot store some layer are left
    out, and of those with scales of other groups that take no less for it (where heads are no wider) all but the best:
    what the chip's kernels read, and then what loses least."""
    layers = config.layer_configs
    head_dims = sorted({layer.head_dim for layer in layers if not layer.is_recurrent})
    kinds: dict[Any, list[str]] = {}
    for name in names or FORMATS:
        format = FORMATS[name]
        if names or all(can_hold(layer, format) for layer in layers):
            scales = (format.group_size, format.scale_dtype.itemsize) if format.is_quantized else None
            kinds.setdefault((format.bytes_per_element, scales), []).append(name)
    if names:
        return list(kinds.values())
    best: dict[Any, list[str]] = {}
    for (element, scales), kind in kinds.items():
        memory = element, scales and scales[1], tuple(map(FORMATS[kind[0]].scale_axes, head_dims))
        found = best.setdefault(memory, kind)
        best[memory] = min(found, kind, key=lambda x: (not has_kernel(chip, layers, x[0]), FORMATS[x[0]].loss))
    return list(best.values())


def _read_model(folder: pathlib.Path) -> tuple[Any, str]:
    """Returns the model's config and the name of its quantization if `load` does not support it: a plan needs only
    shapes."""
    from jaxkv.models.checkpoints import open_checkpoint

    checkpoint = open_checkpoint(folder)
    refused = checkpoint.find_refused_quantization()
    config, dtype = checkpoint.read_config(("quantization_config",) if refused else ()), checkpoint.read_dtype()
    # Mixers keep the inputs of their convolutions in the model's dtype.
    return dataclasses.replace(config, layers=config.layers_in(dtype if dtype in STATE_DTYPES else "bfloat16")), refused


def _weights(folder: pathlib.Path, config: Any, refused: str) -> tuple[int, str]:
    """Returns the bytes of a model's weights as `load` makes them, and the source of that figure."""
    from jaxkv.models.checkpoints import open_checkpoint
    from jaxkv.models.checkpoints.parameter_counts import count_parameters

    checkpoint = open_checkpoint(folder)
    dtype = checkpoint.read_dtype()
    try:
        element = jnp.dtype(dtype).itemsize
    except TypeError:
        raise ValueError(f"{folder} has weights of {dtype}, whose size is not known: say it with --weights.") from None
    count = count_parameters(config)
    note = f"; the folder has them as {refused}, which load does not read" if refused else ""
    if not refused and (kind := checkpoint.find_loaded_quantization()):
        note = f"; the folder has them as {kind}, which load dequantizes"
    return count * element, f"{count:,} parameters of {dtype}{note}"
