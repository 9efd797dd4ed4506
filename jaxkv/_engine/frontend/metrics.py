"""What an engine says of its work: counters summed over its cores, latencies, Prometheus' text format."""

import collections
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jaxkv._engine.requests.request import Request
from jaxkv._engine.runner.engine_core import EngineCore

# What `Engine.stats` returns. Those of "counter" only grow; a list has a number for each group of layers.
MEANINGS = {
    "running": ("gauge", "samples that have a row"),
    "waiting": ("gauge", "samples that wait for a row"),
    "oldest_waiting_seconds": ("gauge", "time since the submission of the request that has waited longest"),
    "free_rows": ("gauge", "rows without a sample"),
    "free_blocks": (
        "gauge",
        "blocks that a row can take, in each group of layers, those of evictable prefixes included; a lower bound: "
        "what ended with the last step counts after the next",
    ),
    "blocks_peak": ("gauge", "most blocks in use at any time, the groups' summed"),
    "steps": ("counter", "steps computed"),
    "tokens": ("counter", "tokens computed, of prompts and outputs"),
    "sent": ("counter", "rows that came from the engine's prefill=, a model or another process"),
    "preemptions": ("counter", "rows freed for others because blocks ran out; their requests go on later"),
    "set_back": ("counter", "preemptions, by its older name"),
    "swapped_out": ("counter", "preemptions whose blocks went to host memory"),
    "acceptance": ("gauge", "accepted share of the draft tokens of speculative decoding"),
    "first_token_seconds": ("summary", "from submit to the first token: p50, p90 and p99 of the last 1,024"),
    "between_tokens_seconds": ("summary", "between tokens of a request: p50, p90 and p99 of the last 1,024"),
    # With prefix_cache=True:
    "lookups": ("counter", "prompts looked up in the prefix cache"),
    "hits": ("counter", "lookups that found a prefix"),
    "tokens_asked": ("counter", "tokens of the prompts looked up"),
    "tokens_saved": ("counter", "tokens that were found, and not computed"),
    "hit_rate": ("gauge", "tokens_saved / tokens_asked"),
    "blocks": ("gauge", "blocks that the prefix cache keeps"),
    "blocks_pinned": ("gauge", "blocks that are pinned, and never evicted"),
    "blocks_evicted": ("counter", "blocks dropped from the device for others"),
    "blocks_spilled": ("counter", "blocks moved to host memory"),
    "blocks_restored": ("counter", "blocks brought back from host memory or disk"),
    "host_bytes": ("gauge", "bytes of prefixes in host memory"),
    "snapshots": ("gauge", "states of recurrent layers that the prefix cache keeps"),
    "snapshots_on_host": ("gauge", "states of recurrent layers that have left the device for host memory"),
    "snapshot_bytes": ("gauge", "bytes of these states on the device"),
    # With disk=:
    "disk_bytes": ("gauge", "bytes of prefixes on disk"),
    "disk_blocks_written": ("counter", "blocks written to disk"),
    "disk_blocks_read": ("counter", "blocks read from disk"),
    "disk_blocks_dropped": ("counter", "files removed for others"),
    "disk_blocks_damaged": ("counter", "files that could not be read"),
    "disk_blocks_refused": ("counter", "blocks that the disk could not take"),
}


def steps(cores: Sequence[EngineCore]) -> int:
    return sum(core.runner.steps for core in cores)


def tokens(cores: Sequence[EngineCore]) -> int:
    runners = [runner for core in cores for runner in (core.runner, core.prefill) if runner is not None]
    return sum(runner.tokens for runner in runners)


def set_back(cores: Sequence[EngineCore]) -> int:
    return sum(core.cache_manager.counts["set_back"] for core in cores)


def blocks_peak(cores: Sequence[EngineCore]) -> int:
    return sum(core.cache_manager.device.blocks_peak for core in cores)


def collect(cores: Sequence[EngineCore]) -> dict[str, Any]:
    """Returns the counters as plain numbers."""
    running = sum(len(core.scheduler.running) for core in cores)
    free = [core.cache_manager.available for core in cores]
    waited = [s.request.times.submitted for core in cores for s in list(core.scheduler.waiting)]
    accepted, proposed = (sum(getattr(core.runner, name) for core in cores) for name in ("accepted", "proposed"))
    return {
        "running": running,
        "oldest_waiting_seconds": max(0.0, time.monotonic() - min(waited)) if waited else 0.0,
        "free_rows": sum(core.cache_manager.config.max_seqs for core in cores) - running,
        "free_blocks": [sum(group) for group in zip(*free, strict=True)],
        "steps": steps(cores),
        "tokens": tokens(cores),
        "blocks_peak": blocks_peak(cores),
        "sent": sum(core.prefill.sent for core in cores if core.prefill),
        "acceptance": accepted / max(proposed, 1),
        "preemptions": set_back(cores),
        "set_back": set_back(cores),
        "swapped_out": sum(core.cache_manager.counts["swapped_out"] for core in cores),
    }


RECENT = 1024  # times that quantiles are of


class Latencies:
    """Seconds from `submit` to a request's first token, and between its tokens; of the recent ones."""

    def __init__(self) -> None:
        self.first: collections.deque[float] = collections.deque(maxlen=RECENT)
        self.between: collections.deque[float] = collections.deque(maxlen=RECENT)

    def observe(self, request: Request) -> None:
        """Counts the tokens of a request that were not counted yet."""
        times = request.times.tokens
        while request.observed < len(times):
            at = request.observed
            if at:
                self.between.append(times[at] - times[at - 1])
            else:
                self.first.append(times[0] - request.times.submitted)
            request.observed += 1

    def stats(self) -> dict[str, dict[str, float]]:
        return {
            "first_token_seconds": find_quantiles(list(self.first)),
            "between_tokens_seconds": find_quantiles(list(self.between)),
        }


def find_quantiles(seconds: Iterable[float]) -> dict[str, float]:
    """Returns the median, 90th and 99th percentile; nothing of no times.

    >>> find_quantiles(range(1, 101))
    {'p50': 50.5, 'p90': 90.1, 'p99': 99.01}
    """
    seconds = list(seconds)
    if not seconds:
        return {}
    cuts = statistics.quantiles([*seconds, *seconds] if len(seconds) == 1 else seconds, n=100, method="inclusive")
    return {f"p{percent}": cuts[percent - 1] for percent in (50, 90, 99)}


def render_prometheus(stats: dict[str, Any], prefix: str = "jaxkv_") -> str:
    """Returns statistics in Prometheus' text format, by the package `prometheus_client`."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import Metric
    except ImportError as error:
        raise ImportError(
            'Prometheus\' text format is written by the package prometheus_client: pip install "jaxkv[serve]".'
        ) from error

    class Collector:
        def collect(self) -> Iterable[Any]:
            for name, value in stats.items():
                kind, meaning = MEANINGS[name]
                metric = Metric(prefix + name, meaning, kind)
                sample = f"{prefix}{name}_total" if kind == "counter" else prefix + name
                for labels, number in _samples(value):
                    metric.add_sample(sample, labels, number)
                yield metric

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


def _samples(value: Any) -> list[tuple[dict[str, str], float]]:
    if isinstance(value, dict):
        return [({"quantile": str(int(name[1:]) / 100)}, number) for name, number in value.items()]
    if isinstance(value, list):
        return [({"group": str(group)}, number) for group, number in enumerate(value)]
    return [({}, value)]
