"""A Flax NNX decoder that reads Hugging Face checkpoints: `model = jaxkv.models.load(folder)`."""

from jaxkv.models.config import (
    DecoderConfig as DecoderConfig,
    ExpertsConfig as ExpertsConfig,
    LatentConfig as LatentConfig,
)
from jaxkv.models.decoder import Decoder as Decoder
from jaxkv.models.loader import load as load, save as save, small as small
from jaxkv.models.rope import Rope as Rope

__all__ = ["Decoder", "DecoderConfig", "ExpertsConfig", "LatentConfig", "Rope", "load", "save", "small"]
