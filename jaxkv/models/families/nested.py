"""Text models inside models for text, images and sound: only the text model is read, and the towers are skipped.

Their config.json nests the text model's config, and their weights have a prefix before the text model's names.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family

# Fields beside `text_config` that describe a tower or the tokens that stand for what it reads, and its tensors.
FIELDS = {
    "vision": r"(vision|image|video|projector|multimodal|spatial|mm)_.*|(bo|eo)[iv]_token_(id|index)",
    "audio": r"audio_.*|(bo|eo)a_token_(id|index)",
}
TENSORS = {
    "vision": "vision_tower|vision_model|visual|multi_modal_projector|embed_vision",
    "audio": "audio_tower|embed_audio",
}
# Prefixes of older and newer versions of transformers; the output head is beside the text model.
PREFIX = re.compile(r"language_model\.(?=(model|lm_head)\.)|model\.language_model\.")
# Fields of the text model in the outer config hold for both.
BOTH = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "torch_dtype", "dtype", "quantization_config")


def make_nested(
    texts: Mapping[str, Family], architecture: str, *, towers: tuple[str, ...] = ("vision",),
    defaults: Mapping[str, Any] | None = None,
) -> Family:  # fmt: skip
    """Returns the family of models that nest one of the text families `texts`, by `model_type`; the first by default.

    Args:
      architecture: the transformers class.
      towers: what else such a model has.
      defaults: of fields that a `text_config` may omit.
    """
    first, *others = texts
    outside = re.compile("|".join(FIELDS[tower] for tower in towers))
    skipped = re.compile(rf"(model\.)?({'|'.join(TENSORS[tower] for tower in towers)})\.")

    def flatten(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Moves the fields of the text config to the top."""
        outer = Fields(config, where)
        outer.take("model_type")
        inner = outer.take("text_config", None)
        text = Fields({} if inner is None else inner, f"text_config in {where}")
        family = text.take("model_type", first)
        if not isinstance(family, str) or family not in texts:
            raise text.refuse("model_type", family, " and ".join([first, *others]))
        said = {name: outer.take(name) for name in BOTH if outer.left.get(name) is not None}
        rest = {name: x for name, x in outer.left.items() if name not in text.left and not outside.fullmatch(name)}
        return rest | dict(defaults or {}) | text.left | said | {"model_type": family}

    def name_tensor(name: str, config: Mapping[str, Any]) -> str | None:
        """Returns the name of a tensor in the text model; None for a tensor of a tower."""
        if skipped.match(name):
            return None
        name = PREFIX.sub(lambda found: "model." if found[0].startswith("model.") else "", name, count=1)
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else {}
        return texts.get(str(text.get("model_type")), texts[first]).name_tensor(name, text)

    return Family(
        parse=texts[first].parse, render=texts[first].render, flatten=flatten, name_tensor=name_tensor,
        repack=texts[first].repack,
        architectures=(architecture, *(name for family in texts.values() for name in family.architectures)),
    )  # fmt: skip
