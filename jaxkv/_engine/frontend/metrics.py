"""The counters of an engine, summed over its loops."""

from collections.abc import Sequence
from typing import Any

from jaxkv._engine.runner.engine_core import EngineCore


def steps(loops: Sequence[EngineCore]) -> int:
    return sum(loop.pipeline.steps for loop in loops)


def tokens(loops: Sequence[EngineCore]) -> int:
    prefills = [loop.prefill.pipeline for loop in loops if loop.prefill]
    return sum(pipeline.tokens for pipeline in [*prefills, *(loop.pipeline for loop in loops)])


def set_back(loops: Sequence[EngineCore]) -> int:
    return sum(loop.residents.counts["set_back"] for loop in loops)


def blocks_peak(loops: Sequence[EngineCore]) -> int:
    return sum(int(table.peak) for loop in loops for table in loop.cache.tables)


def collect(loops: Sequence[EngineCore]) -> dict[str, Any]:
    """Returns the counters as plain numbers."""
    accepted, proposed = (sum(getattr(loop.pipeline, name) for loop in loops) for name in ("accepted", "proposed"))
    return {
        "steps": steps(loops),
        "tokens": tokens(loops),
        "blocks_peak": blocks_peak(loops),
        "sent": sum(loop.prefill.sent for loop in loops if loop.prefill),
        "acceptance": accepted / max(proposed, 1),
        "set_back": set_back(loops),
        "swapped_out": sum(loop.residents.counts["swapped_out"] for loop in loops),
    }
