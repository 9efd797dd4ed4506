"""Phi 3 and 4: Llama with fused projections, one sliding window or none, LongRoPE, and rotations of a part of a head.

`qkv_proj` holds queries, keys and values, `gate_up_proj` both halves of the MLP. Of LongRoPE's two lists, the long one
is used where `max_position_embeddings` is above `original_max_position_embeddings`, also for short texts, as vLLM does;
transformers uses the short one until a text is longer. Refuses other scalings, and lists of another length.
"""

from typing import Any

from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family, Rows, read_uniform, render_uniform

QKV, GATE_UP = ("attention.query", "attention.key", "attention.value"), ("mlp.gate", "mlp.up")
TENSORS = {name: Rows("self_attn.qkv_proj.weight", QKV) for name in QKV}
TENSORS |= {name: Rows("mlp.gate_up_proj.weight", GATE_UP) for name in GATE_UP}


def parse(fields: Fields) -> DecoderConfig:
    options = {"partial": 1.0, "scalings": ("default", "longrope")}
    common = read_uniform(fields, num_kv_heads=(None,), norm_eps=1e-5, rope=options)
    window, rope = fields.size("sliding_window", None), common["ropes"][0]
    pairs = rope.rotated_dim(common["head_dim"]) // 2
    if rope.scaling == "longrope" and len(rope.divisors) != pairs:
        raise fields.refuse("long_factor or short_factor", list(rope.divisors), f"{pairs} numbers")
    return DecoderConfig(**common | {"windows": (window,) * len(common["windows"])})


def render(config: DecoderConfig) -> dict[str, Any]:
    return render_uniform(config) | {"sliding_window": config.windows[0]}


FAMILY = Family(parse=parse, render=render, architectures=("Phi3ForCausalLM",), tensors=TENSORS)
