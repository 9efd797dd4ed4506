"""The module of each mixer's config."""

from typing import Any

from flax import nnx

from jaxkv.models.config import DecoderConfig
from jaxkv.models.mixers.block_config import DeltaConfig, Mixer, ShortConvConfig
from jaxkv.models.mixers.delta import DeltaMixer
from jaxkv.models.mixers.mixer import MixerModule
from jaxkv.models.mixers.short_conv import ShortConvMixer

MODULES: dict[type, type[MixerModule]] = {DeltaConfig: DeltaMixer, ShortConvConfig: ShortConvMixer}


def make_mixer(config: DecoderConfig, mixer: Mixer, dtype: Any, rngs: nnx.Rngs) -> MixerModule:
    """Makes the module of a mixer's config."""
    return MODULES[type(mixer)](config, mixer, dtype, rngs)
