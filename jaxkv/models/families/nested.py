"""Text models inside models for text, images and sound: only the text model is read, and the towers are skipped.

Their config.json nests the text model's config, and their weights have a prefix before the text model's names.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv.models.config_fields import Fields
from jaxkv.models.families.family import Family

# Fields that describe a tower or the tokens that stand for what it reads, and its tensors.
FIELDS = {
    "vision": r"(.*_)?(vision|images?|video|pixels?|patch|patches|tiles?|thumbnail|projector|multimodal|mm)(_.*)?"
    r"|spatial_.*|media_.*|projection_.*|(scale|downsample)_factor|downsample_ratio|(bo|eo)[iv]_token_(id|index)",
    "audio": r"audio_.*|(bo|eo)a_token_(id|index)",
}
TENSORS = {
    "vision": "vision_tower|vision_model|visual|multi_modal_projector|mm_projector|connector|image_newline"
    "|embed_vision",
    "audio": "audio_tower|embed_audio",
}
# Prefixes of older and newer versions of transformers; the output head is beside the text model.
PREFIX = re.compile(r"language_model\.(?=(model|lm_head)\.)|model\.(language|text)_model\.")
# Fields of the text model in the outer config hold for both.
BOTH = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "torch_dtype", "dtype", "quantization_config")
Defaults = Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]]


def drop_grid_positions(name: str, value: Any) -> Any:
    """Returns a field of a config without the positions of an image's parts in time, height and width, by which each
    section of a head is rotated: those of a text's token are the same."""
    if name not in ("rope_parameters", "rope_scaling") or not isinstance(value, Mapping):
        return value
    kept = {key: x for key, x in value.items() if not str(key).startswith("mrope_")}
    return kept | {key: "default" for key in ("type", "rope_type") if kept.get(key) == "mrope"}


def make_nested(
    texts: Mapping[str, Family], *architectures: str, towers: tuple[str, ...] = ("vision",),
    defaults: Defaults | None = None, names: Mapping[str, str] | None = None,
) -> Family:  # fmt: skip
    """Returns the family of models that nest one of the text families `texts`, by `model_type`; the first by default.

    Args:
      architectures: the transformers class, and its names elsewhere.
      towers: what else such a model has.
      defaults: of fields that a `text_config` may omit; or what returns them for the others.
      names: the `model_type` of text models that are called otherwise where they are nested.
    """
    first, *others = texts
    outside = re.compile("|".join(FIELDS[tower] for tower in towers))
    skipped = re.compile(rf"(model\.)?({'|'.join(TENSORS[tower] for tower in towers)})(\.|$)")

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
        rest = {name: x for name, x in outer.left.items() if name not in text.left}
        absent = defaults(rest | text.left) if callable(defaults) else defaults or {}
        found = {**absent, **rest, **text.left, **said}
        found = {name: drop_grid_positions(name, x) for name, x in found.items() if not outside.fullmatch(name)}
        return found | {"model_type": (names or {}).get(family, family)}

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
        architectures=(*architectures, *(name for family in texts.values() for name in family.architectures)),
    )  # fmt: skip
