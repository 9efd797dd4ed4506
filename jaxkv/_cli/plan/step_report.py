"""Formats the bound of a decode step as text and as JSON, and of many mesh shapes as a table."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv._cli.plan.chips import Chip
from jaxkv._cli.plan.decode_step import DecodeStep
from jaxkv._cli.units import columns
from jaxkv._core.cache.inspection import format_bytes


def step_as_json(step: DecodeStep, chip: Chip | None) -> dict[str, Any]:
    """Returns bytes, operations and seconds of each device, and rows and tokens/s of all devices."""
    fields: dict[str, Any] = {
        "rows": step.rows * step.devices.data,
        "read_weights": round(step.read_weights),
        "read_cache": round(step.read_cache),
        "flops": round(step.flops),
        "sent": step.sent,
        "collectives": [dataclasses.asdict(x) | {"sent": x.sent} for x in step.collectives],
    }
    if chip is not None:
        fields["sent_over"] = {}
        for _, link, sent in step.sent_over(chip):
            fields["sent_over"][link.name] = fields["sent_over"].get(link.name, 0) + round(sent)
        fields |= {"seconds": step.seconds(chip), "tokens_per_second": step.tokens_per_second(chip)}
    return fields


def step_as_text(step: DecodeStep, chip: Chip) -> str:
    """Describes each device's work, the rates, and the minimum time."""
    seconds, memory = step.seconds(chip), f"memory, {chip.memory_rate / 1e9:,.0f} GB/s"
    lines = [
        ("a decode step", "bytes", "over", "ms"),
        ("reads weights", format_bytes(round(step.read_weights)), memory, _ms(step.read_weights / chip.memory_rate)),
        ("reads the cache", format_bytes(round(step.read_cache)), memory, _ms(step.read_cache / chip.memory_rate)),
        (f"computes {step.flops / 1e9:,.1f} GFLOP", "", f"{chip.peak / 1e12:,.0f} TFLOP/s", _ms(seconds["compute"])),
    ]
    for x, link, sent in step.sent_over(chip):
        what = f"sends in {x.count} {x.kind}{'s' * (x.count > 1)} over {x.devices} ({x.over})"
        by = f"{link.name}, {link.rate / 1e9:g} GB/s"
        lines.append((what, format_bytes(round(sent)), by, _ms(sent / link.rate)))
    terms = f"max({_ms(seconds['read'])}, {_ms(seconds['compute'])}) + {_ms(seconds['send'])}"
    rate, rows = f"{step.tokens_per_second(chip):,.0f}", f"{step.rows * step.devices.data:,}"
    whose = "the device" if step.devices.count == 1 else f"each of {step.devices.count:,} devices"
    return (
        f"{columns(lines, left=(0, 2))}\n"
        f"A step takes {whose} at least {terms} = {_ms(seconds['step'])} ms: at most {rate} tokens/s in {rows} rows.\n"
        f"Of {chip.name}: {chip.source}."
    )


def shapes_as_text(shapes: Sequence[tuple[dict[str, int], DecodeStep]], chip: Chip) -> str:
    """Formats a line for each mesh shape: memory of a device, and its step."""
    lines = [("shape", "weights", "cache", "rows", "tokens", "sent", "step, ms", "tokens/s")]
    for contents, step in shapes:
        d = step.devices
        lines.append(
            (
                str(d),
                format_bytes(contents["weights"]),
                format_bytes(contents["cache"]),
                f"{contents['rows'] * d.data:,}",
                f"{contents['tokens'] * d.data * d.context:,}",
                format_bytes(step.sent),
                _ms(step.seconds(chip)["step"]),
                f"{step.tokens_per_second(chip):,.0f}",
            )
        )
    return (
        f"{columns(lines)}\n\nshape: tensor x data x context. weights, cache, sent: of each device, sent in a decode "
        "step. rows, tokens, tokens/s: of all.\nA step takes at least max(bytes read / memory's rate, operations / "
        f"peak) + bytes sent / the interconnect's rate. Of {chip.name}: {chip.source}."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
