"""Writes the results of `plan` as JSON."""

import dataclasses
from typing import Any

from jaxkv._cli.plan.report import Needs, Report, count_facts, device_contents
from jaxkv._cli.plan.step_report import step_as_json


def as_json(report: Report) -> dict[str, Any]:
    """Returns the report as JSON: lengths in tokens; blocks, tokens and rows of all devices, bytes of each device."""
    model, memory, devices = report.model, report.memory, report.devices
    kept = next(layer for layer in model.layer_configs if not layer.is_recurrent)
    options = [
        {
            "block_size": option.block_size,
            "dtypes": option.dtypes,
            "fits": option.plan is not None,
            "has_kernel": report.has_kernel(option.dtypes[0], option.block_size),
        }
        | ({} if option.plan is None else count_facts(option.plan, devices))
        for option in report.options
    ]
    return {
        "model": {"family": model.family, "layers": model.num_layers, "num_kv_heads": kept.num_kv_heads,
                  "head_dim": kept.head_dim, "windows": list(model.windows),
                  "top_k": None if model.index is None else model.index.top_k},
        "memory": {"total": memory.total, "weights": memory.weights, "weights_from": memory.source,
                   "cache": memory.cache, "rest": memory.rest},
        "devices": {"count": devices.count} | dataclasses.asdict(devices)
        | {"hosts": report.hosts, "moved_per_step": report.step.sent},
        "chip": None if report.chip is None else dataclasses.asdict(report.chip),
        "each_device": device_contents(report),
        "step": step_as_json(report.step, report.chip),
        "max_seq_len": report.max_seq_len,
        "mean_len": report.best.mean_len,
        "asked": [asked._asdict() | {"fits": asked.bytes <= memory.cache} for asked in report.asked],
        "options": options,
        "suggestion": report.suggestion,
    }  # fmt: skip


def needs_as_json(needs: Needs) -> dict[str, Any]:
    return {
        "weights": needs.weights, "weights_from": needs.source, "devices": needs.devices,
        "asked": [asked._asdict() for asked in needs.asked],
    }  # fmt: skip
