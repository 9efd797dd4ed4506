"""The prefix caches of data-parallel devices, viewed as one."""

from typing import Any

from jaxkv._core.cache.data_parallel import RowShards
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache


class PrefixShards:
    """The `PrefixCache` of each device of an engine whose rows are divided. Devices share only the files of a folder.

    Attributes:
      shards: the `PrefixCache` of each device.
    """

    def __init__(self, shards: list[PrefixCache]):
        self.shards = shards

    def stats(self) -> dict[str, Any]:
        """Returns `PrefixCache.stats`, of all together."""
        each = [shard.stats() for shard in self.shards]
        found = {name: _sum([stats[name] for stats in each]) for name in each[0]}
        found |= {name: count for name, count in each[0].items() if name.startswith("disk_")}  # they have one folder
        return found | {"hit_rate": found["tokens_saved"] / max(found["tokens_asked"], 1)}

    def flush(self, cache: RowShards) -> None:
        """Writes to disk, as `PrefixCache.flush`."""
        for shard, own in zip(self.shards, cache.shards, strict=True):
            shard.flush(own)


def join_prefixes(shards: list[PrefixCache | None]) -> Any:
    """Returns the only shard, or all of them, or None."""
    found = [shard for shard in shards if shard is not None]
    return PrefixShards(found) if len(found) > 1 else next(iter(found), None)


def _sum(values: list[Any]) -> Any:
    return [sum(several) for several in zip(*values, strict=True)] if isinstance(values[0], list) else sum(values)
