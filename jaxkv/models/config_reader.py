"""Converts a Hugging Face config.json to a `DecoderConfig` and back: a field is honoured, harmless, or refused."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv._core.config.validation import show
from jaxkv.models.checkpoint_formats import FP8, GIVE_OTHERS, MXFP4
from jaxkv.models.config import DecoderConfig
from jaxkv.models.config_fields import Fields
from jaxkv.models.config_gate import check_architectures, drop_ignored, warn_passed
from jaxkv.models.families import FAMILIES, Family

MOST_FAMILIES = 8  # in an error


def parse(config: Mapping[str, Any], where: str = "config.json", ignore: str | Iterable[str] = ()) -> DecoderConfig:
    """Reads a config.json, in the old or the new form.

    Args:
      config: its fields.
      where: name of the config in errors.
      ignore: names of fields to treat as missing.

    Raises:
      ValueError: a family or a field that the decoder cannot honour, or a field that is missing; all by name.
    """
    config = drop_ignored(config, ignore)
    family = find_family(config, where)
    check_architectures(config, family.architectures, where)
    fields = Fields(family.flatten(config, where), where)
    family = find_family(fields.left, where)  # of the text model, where one is nested
    fields.family = fields.take("model_type")
    _take_quantization(fields)
    decoder = family.parse(fields)
    fields.finish(decoder)
    warn_passed(fields.passed, where)
    return decoder


def find_family(config: Mapping[str, Any], where: str = "config.json") -> Family:
    """Returns the family that a config.json names by `model_type`."""
    name = Fields(config, where).take("model_type", None)
    if not isinstance(name, str) or name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES) if isinstance(name, str) else []
        raise ValueError(
            f"{where} is of the family (model_type) {show(name)}, but the decoder knows "
            f"{', '.join([*FAMILIES][:MOST_FAMILIES])} and {len(FAMILIES) - MOST_FAMILIES} more, listed in "
            f"docs/checkpoints.md{', the nearest ' + ' and '.join(near) if near else ''}."
        )
    return FAMILIES[name]


def render(config: DecoderConfig) -> dict[str, Any]:
    """Writes the fields of a config.json, in the new form, that `parse` reads as `config`."""
    return FAMILIES[config.family].render(config)


def _take_quantization(fields: Fields) -> None:
    """Takes a config's `quantization_config`. Raises ValueError if its format is not supported."""
    quantization = fields.left.get("quantization_config")
    if not isinstance(quantization, Mapping) or not quantization:
        return
    if not is_read(quantization):
        raise ValueError(
            f"{fields.where} says that weights are quantized, quantization_config = {show(quantization)}, which is not "
            f"read: {GIVE_OTHERS}. If these are not, "
            'give ignore=("quantization_config",).'
        )
    fields.take("quantization_config")


def is_read(quantization: Mapping[str, Any]) -> bool:
    """Tells whether the weights that a `quantization_config` describes can be read."""
    return quantization.get("quant_method") in (MXFP4, FP8)
