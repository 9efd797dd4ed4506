"""Gemma 3: Gemma 2 with norms on queries and keys, no soft caps, five layers with a window to one without.

Layers with a window have a rotary embedding of their own. Refuses `attn_logit_softcapping`.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import FULL, SLIDING, Fields
from jaxkv.models.families.family import Family, read_num_layers, read_windows, render_ropes, spread_ropes
from jaxkv.models.families.nested import make_nested
from jaxkv.models.families.postnorm.gemma2 import TENSORS, read_gemma, render_gemma
from jaxkv.models.rope_fields import parse_ropes

# Defaults of fields that a text_config may omit.
DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip


def parse(fields: Fields) -> DecoderConfig:
    num_layers, common = read_num_layers(fields), read_gemma(fields, attention_soft_cap=None, logit_soft_cap=None)
    if (soft_cap := common["attention_soft_cap"]) is not None:  # transformers reads the field and then ignores it
        raise fields.refuse("attn_logit_softcapping", soft_cap, "None")
    pattern = fields.size("sliding_window_pattern", 6)
    types = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    windows = read_windows(fields, types, fields.size("sliding_window", 4096, None))
    ropes = parse_ropes(fields, common["max_seq_len"], theta=1e6, local_theta=1e4)
    return DecoderConfig(
        **common, windows=windows, ropes=spread_ropes(ropes, windows),
        qk_norm=True,
    )  # fmt: skip


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_gemma(config) | render_ropes(config)


FAMILY = Family(parse=parse, render=render, architectures=("Gemma3ForCausalLM",), tensors=TENSORS)
NESTED_FAMILY = make_nested({"gemma3_text": FAMILY}, "Gemma3ForConditionalGeneration", defaults=DEFAULTS)
