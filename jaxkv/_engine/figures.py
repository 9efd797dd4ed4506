"""What an engine has computed so far."""

from collections.abc import Sequence
from typing import Any

from jaxkv._engine.loop import Loop


def figures(loops: Sequence[Loop]) -> dict[str, Any]:
    """As plain numbers; of several loops together."""
    pipelines, prefills = [loop.pipeline for loop in loops], [loop.prefill for loop in loops if loop.prefill]
    found: dict[str, Any] = {
        "steps": sum(pipeline.steps for pipeline in pipelines),
        "tokens": sum(one.tokens for one in [*pipelines, *(prefill.pipeline for prefill in prefills)]),
        "blocks_peak": sum(int(t.peak) for loop in loops for t in loop.cache.tables),
        "sent": sum(prefill.sent for prefill in prefills),
        "acceptance": sum(one.accepted for one in pipelines) / max(sum(one.proposed for one in pipelines), 1),
    }
    return found | {name: sum(loop.residents.counts[name] for loop in loops) for name in ("set_back", "swapped_out")}
