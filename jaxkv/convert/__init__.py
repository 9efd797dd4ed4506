"""Converts a `Cache` to and from the caches of other systems. Import it by name: `import jaxkv.convert`.

- `from_dense(k, v, lengths)`: dense arrays, a row's tokens in order.
- `from_flax(collection)`, `to_flax(cache, collection)`: the cache of Flax's own layers, Linen or NNX.
- `from_hugging_face(past_key_values)`, `to_hugging_face(cache)`: keys and values of each layer, padded to one length.
- `from_blocks(...)`: blocks and block tables of another paged cache.

One system can thus continue a row that another began. None of the other systems is imported: tensors become arrays, and
collections are nested dicts. For the sizes alone, without tokens, see `jaxkv.CacheConfig.like`.
"""

from jaxkv.convert.blocks import from_blocks as from_blocks
from jaxkv.convert.dense import from_dense as from_dense
from jaxkv.convert.flax import from_flax as from_flax, to_flax as to_flax
from jaxkv.convert.hugging_face import from_hugging_face as from_hugging_face, to_hugging_face as to_hugging_face

__all__ = ["from_blocks", "from_dense", "from_flax", "from_hugging_face", "to_flax", "to_hugging_face"]
