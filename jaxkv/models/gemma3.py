"""Gemma 3 as it is published for text and images: the text model's config lies inside, and its weights under a prefix.

The text model is what is read; what sees images is left out.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxkv.models.fields import Fields

NESTED = "gemma3"
# What a text_config leaves out where it means these.
DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
VISION_FIELDS = (
    "vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index",
    "image_token_id", "boi_token_id", "eoi_token_id",
)  # fmt: skip
VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
# As transformers wrote them at first, and as it does since; a head lies beside the text model.
SPELLINGS = (re.compile(r"language_model\.(?=(model|lm_head)\.)"), re.compile(r"model\.language_model\."))


def flattened(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A config with what it says of text at its top; any other as it is."""
    if not isinstance(config, Mapping) or config.get("model_type") != NESTED:
        return config
    outer = Fields(config, where)
    outer.take("model_type")
    for name in VISION_FIELDS:
        outer.take(name, None)
    inner = outer.take("text_config", None)
    text = Fields({} if inner is None else inner, f"text_config in {where}")
    family = text.take("model_type", "gemma3_text")
    if family != "gemma3_text":
        raise text.refuse("model_type", family, "gemma3_text")
    # What of the text model is said outside holds for both.
    both = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "torch_dtype", "dtype")
    said = {name: outer.take(name) for name in both if name in outer.left}
    outer.finish()
    return DEFAULTS | text.left | said | {"model_type": family}


def text_name(name: str) -> str | None:
    """What a tensor of a checkpoint is called in the text model's own; None: it is of what sees images."""
    if VISION.match(name):
        return None
    old, new = SPELLINGS
    return new.sub("model.", name) if new.match(name) else old.sub("", name, count=1) if old.match(name) else name
