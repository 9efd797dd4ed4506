"""The prefix cache of an engine over several processes."""

from typing import Any

from jaxkv._core.config.validation import show
from jaxkv._engine.hosts.lockstep import LockstepCores
from jaxkv._tiers.prefix_cache.arguments import read_tokens
from jaxkv._tiers.prefix_cache.prefix_cache import PrefixCache

READ = ("config", "events", "hashes", "known", "max_pinned", "model", "pinned", "spill_bytes", "stats")


class LockstepPrefix:
    """A `PrefixCache` whose every process has its own, all of them equal.

    What reads it, such as `stats`, `events` and `known`, asks this process's. `pin` and `unpin` are calls of all
    processes, made in the first one. What moves blocks is for the engine alone.
    """

    def __init__(self, core: LockstepCores, prefix: PrefixCache):
        self._core, self._prefix = core, prefix

    def pin(self, tokens: Any, *, salt: str | bytes | None = None, adapter: str | None = None) -> int:
        """Pins the cached prefix of `tokens`, as `PrefixCache.pin`."""
        return self._core.change_pins("pin", read_tokens(tokens), salt, adapter)

    def unpin(self, tokens: Any, *, salt: str | bytes | None = None, adapter: str | None = None) -> None:
        """Undoes one `pin` of the same tokens, as `PrefixCache.unpin`."""
        self._core.change_pins("unpin", read_tokens(tokens), salt, adapter)

    def __getattr__(self, name: str) -> Any:
        if name in READ:
            return getattr(self._prefix, name)
        raise AttributeError(
            f"The PrefixCache of an engine over several processes has no {show(name)} for its users: it has pin, unpin "
            f"and {', '.join(READ)}."
        )

    def __repr__(self) -> str:
        return repr(self._prefix)


def share_prefix(core: Any, prefix: Any) -> Any:
    """Returns the prefix cache of an engine for its users."""
    is_shared = isinstance(core, LockstepCores) and isinstance(prefix, PrefixCache)
    return LockstepPrefix(core, prefix) if is_shared else prefix
