"""Model families, one module each: the fields of config.json, and the parameter names in checkpoints.

`FAMILIES` is the registry, by `model_type`. A new family is a module in the folder of its kind of layers, and a
line below; new decoder features become named options in `jaxkv.models.config`. Imported by the readers of
`jaxkv.models`.
"""

from jaxkv.models.families.experts import (
    glm4_moe,
    gpt_oss,
    llama4,
    minimax_m2,
    mixtral,
    qwen2_moe,
    qwen3_moe,
)
from jaxkv.models.families.family import Family as Family
from jaxkv.models.families.hybrid import (
    falcon_h1,
    granitemoehybrid,
    kimi_linear,
    lfm2,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
)
from jaxkv.models.families.latent import deepseek, deepseek_sparse, mistral4
from jaxkv.models.families.postnorm import exaone4, gemma2, gemma3, gemma3n, gemma4, glm4, olmo2, olmo3
from jaxkv.models.families.prenorm import (
    ernie4_5,
    granite,
    hunyuan_v1_dense,
    llama,
    ministral3,
    mistral,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
)
from jaxkv.models.families.vision_language import make_wrappers

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "deepseek_v2": deepseek.V2_FAMILY,
    "deepseek_v3": deepseek.V3_FAMILY,
    "kimi_k2": deepseek.V3_FAMILY,
    "deepseek_v32": deepseek_sparse.DEEPSEEK_FAMILY,
    "glm_moe_dsa": deepseek_sparse.GLM_FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "smollm3": smollm3.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo3.FAMILY,
    "granite": granite.FAMILY,
    "seed_oss": seed_oss.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "ernie4_5": ernie4_5.FAMILY,
    "exaone4": exaone4.FAMILY,
    "glm4": glm4.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "hunyuan_v1_dense": hunyuan_v1_dense.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "ministral3": ministral3.FAMILY,
    "phi3": phi3.FAMILY,
    "gemma3": gemma3.NESTED_FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "gemma3n_text": gemma3n.FAMILY,
    "gemma3n": gemma3n.NESTED_FAMILY,
    "mistral4": mistral4.FAMILY,
    "mistral3": mistral4.NESTED_FAMILY,
    "gemma4_text": gemma4.FAMILY,
    "gemma4": gemma4.NESTED_FAMILY,
    "llama4_text": llama4.FAMILY,
    "llama4": llama4.NESTED_FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_5": qwen3_5.NESTED_FAMILY,
    "qwen3_5_moe_text": qwen3_5.MOE_FAMILY,
    "qwen3_5_moe": qwen3_5.NESTED_MOE_FAMILY,
    "lfm2": lfm2.FAMILY,
    "olmo_hybrid": olmo_hybrid.FAMILY,
    "kimi_linear": kimi_linear.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "falcon_h1": falcon_h1.FAMILY,
}
FAMILIES |= make_wrappers(FAMILIES)
