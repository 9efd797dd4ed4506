"""Models that read images and text around a text model of another family: Qwen VL, Kimi K2.5, LLaVA, InternVL, GLM V.

Only the text model is read. It is the family of that name alone: saved again, it is that family's checkpoint.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxkv.models.families.family import Family
from jaxkv.models.families.nested import Defaults, make_nested

# Text models that any wrapper may have; all of their checkpoints are stored alike alone and nested.
PLAIN = (
    "llama", "mistral", "mixtral", "ministral3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "phi3",
    "gemma2", "gemma3_text", "granite", "olmo2", "smollm3", "seed_oss", "glm4", "exaone4", "lfm2",
)  # fmt: skip


class Wrapper(NamedTuple):
    """How models of one `model_type` hold their text model.

    Fields:
      architectures: the transformers class, and its names elsewhere.
      texts: the family of each `model_type` that the text model may have; the first by default.
      defaults: of fields that a `text_config` may omit; or what returns them for the others.
    """

    architectures: tuple[str, ...]
    texts: Mapping[str, str]
    defaults: Defaults = MappingProxyType({})


def _any_text(first: str) -> dict[str, str]:
    return {first: first} | {name: name for name in PLAIN}


def _read_glm_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the width of heads too, which GLM 4 alone has as a number."""
    width, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1:
        return EPS
    return EPS | {"head_dim": width // heads}


EPS = {"rms_norm_eps": 1e-5}
QWEN2 = {"qwen2_vl_text": "qwen2"}
TIED = {"tie_word_embeddings": True}
WRAPPERS = {
    "qwen2_vl": Wrapper(("Qwen2VLForConditionalGeneration",), QWEN2, EPS),
    "qwen2_5_vl": Wrapper(("Qwen2_5_VLForConditionalGeneration",), {"qwen2_5_vl_text": "qwen2"} | QWEN2, EPS),
    "qwen3_vl": Wrapper(("Qwen3VLForConditionalGeneration",), {"qwen3_vl_text": "qwen3"}),
    "qwen3_vl_moe": Wrapper(
        ("Qwen3VLMoeForConditionalGeneration",), {"qwen3_vl_moe_text": "qwen3_moe"}, {"norm_topk_prob": True},
    ),
    "kimi_k25": Wrapper(
        ("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        {"kimi_k2": "kimi_k2", "deepseek_v3": "deepseek_v3"},
    ),
    "glm4v": Wrapper(("Glm4vForConditionalGeneration",), {"glm4v_text": "glm4"}, _read_glm_defaults),
    "glm4v_moe": Wrapper(
        ("Glm4vMoeForConditionalGeneration",), {"glm4v_moe_text": "glm4_moe"}, {"attention_bias": True}
    ),
    "exaone4_5": Wrapper(
        ("Exaone4_5_ForConditionalGeneration",), {"exaone4": "exaone4", "exaone4_5_text": "exaone4"}
    ),
    "llava": Wrapper(("LlavaForConditionalGeneration",), _any_text("llama")),
    "llava_next": Wrapper(("LlavaNextForConditionalGeneration",), _any_text("llama")),
    "llava_onevision": Wrapper(("LlavaOnevisionForConditionalGeneration",), _any_text("qwen2")),
    "internvl": Wrapper(("InternVLForConditionalGeneration",), _any_text("qwen2"), TIED),
    "idefics3": Wrapper(("Idefics3ForConditionalGeneration",), _any_text("llama"), EPS),
    "smolvlm": Wrapper(("SmolVLMForConditionalGeneration",), _any_text("llama"), EPS),
    "lfm2_vl": Wrapper(("Lfm2VlForConditionalGeneration",), _any_text("lfm2"), TIED),
}  # fmt: skip


def make_wrappers(families: Mapping[str, Family]) -> dict[str, Family]:
    """Returns the families of `WRAPPERS`, by `model_type`."""

    def make(wrapper: Wrapper) -> Family:
        texts = {name: families[family] for name, family in wrapper.texts.items()}
        return make_nested(texts, *wrapper.architectures, defaults=wrapper.defaults, names=wrapper.texts)

    return {name: make(wrapper) for name, wrapper in WRAPPERS.items()}
