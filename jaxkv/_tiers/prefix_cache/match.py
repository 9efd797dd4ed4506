"""The result of `PrefixCache.match`."""

import dataclasses

from jaxkv._tiers.prefix_cache.node import Node


@dataclasses.dataclass(frozen=True)
class Match:
    """The cached prefix of a prompt: its first `num_tokens` tokens, in whole blocks.

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, num_blocks=4))
    >>> prefix, tokens = jaxkv.PrefixCache(cache.config), [*range(20)]
    >>> cache = prefix.insert(jaxkv.extend(cache, [20, 0]), 0, tokens)
    >>> match = prefix.match([*tokens, 7, 7])
    >>> match.num_tokens
    16
    >>> prefix.adopt(cache, 1, match).lengths.tolist()
    [20, 16]
    """

    num_tokens: int
    nodes: tuple[Node, ...] = dataclasses.field(repr=False)
    is_repeat: bool = dataclasses.field(default=False, repr=False)  # it counts in no statistics
    # The tokens whose blocks are known, of which a row with states can adopt those up to a snapshot.
    num_known: int = dataclasses.field(default=0, repr=False)
