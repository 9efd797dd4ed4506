"""Between a `Cache` and what others hold: blocks and tables, plain dense arrays, Hugging Face's and Flax's caches.

Nothing of theirs is imported: tensors are turned into arrays, and collections are nested dicts.
"""

from jaxkv.convert.blocks import from_blocks as from_blocks
from jaxkv.convert.dense import from_dense as from_dense
from jaxkv.convert.flax import from_flax as from_flax, to_flax as to_flax
from jaxkv.convert.hugging_face import from_hugging_face as from_hugging_face, to_hugging_face as to_hugging_face

__all__ = ["from_blocks", "from_dense", "from_flax", "from_hugging_face", "to_flax", "to_hugging_face"]
