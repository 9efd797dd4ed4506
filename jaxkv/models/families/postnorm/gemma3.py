"""Gemma 3: Gemma 2 with norms on queries and keys, no soft caps, five layers with a window to one without.

Layers with a window have a rotary embedding of their own. Models for text and images nest the text model's config, and
prefix its weights; only the text model is read, and the vision tower is skipped.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, SLIDING, Fields
from jaxkv.models.families.family import Family, read_num_layers, read_windows
from jaxkv.models.families.postnorm.gemma2 import TENSORS, read_gemma, render_gemma
from jaxkv.models.rope_fields import parse_ropes, render_rope

NESTED, TEXT = "gemma3", "gemma3_text"
ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
# Defaults of fields that a text_config may omit.
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
# Prefixes of older and newer versions of transformers; the output head is beside the text model.
SPELLINGS = (re.compile(r"language_model\.(?=(model|lm_head)\.)"), re.compile(r"model\.language_model\."))


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_gemma(fields, attention_soft_cap=None, logit_soft_cap=None)
    if (soft_cap := common["attention_soft_cap"]) is not None:  # transformers reads the field and then ignores it
        raise fields.refuse("attn_logit_softcapping", soft_cap, "None")
    pattern = fields.size("sliding_window_pattern", 6)
    types = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    windows = read_windows(fields, types, fields.size("sliding_window", 4096, None))
    ropes = parse_ropes(fields, common["max_seq_len"], theta=1e6, local_theta=1e4)
    return DecoderConfig(
        **common, windows=windows, ropes=tuple(ropes[FULL if window is None else SLIDING] for window in windows),
        qk_norm=True,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    ropes = {kind: render_rope(rope) for kind, rope in zip(kinds, config.ropes, strict=True)}
    return render_gemma(config) | {"rope_parameters": ropes}


def flatten(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Moves the fields of a nested text config to the top."""
    outer = Fields(config, where)
    outer.take("model_type")
    for name in VISION_FIELDS:
        outer.take(name, None)
    inner = outer.take("text_config", None)
    text = Fields({} if inner is None else inner, f"text_config in {where}")
    family = text.take("model_type", TEXT)
    if family != TEXT:
        raise text.refuse("model_type", family, TEXT)
    # Fields of the text model in the outer config hold for both.
    both = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "torch_dtype", "dtype")
    said = {name: outer.take(name) for name in both if name in outer.left}
    rest = {name: value for name, value in outer.left.items() if name not in text.left}  # for the gate
    return rest | DEFAULTS | text.left | said | {"model_type": family}


def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns the name of a tensor in the text model; None for a tensor of the vision tower."""
    if VISION.match(name):
        return None
    old, new = SPELLINGS
    return new.sub("model.", name) if new.match(name) else old.sub("", name, count=1) if old.match(name) else name


FAMILY = Family(parse=parse, render=render, architectures=ARCHITECTURES, tensors=TENSORS)
NESTED_FAMILY = Family(
    parse=parse, render=render, architectures=ARCHITECTURES, tensors=TENSORS, flatten=flatten,
    name_tensor=name_tensor,
)  # fmt: skip
