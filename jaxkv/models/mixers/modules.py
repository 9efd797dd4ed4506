"""The module of each mixer's config."""

from typing import Any

from flax import nnx

from jaxkv.models.config import DecoderConfig
from jaxkv.models.mixers.block_config import DeltaConfig, Mixer, ShortConvConfig, SpaceConfig
from jaxkv.models.mixers.delta import DeltaMixer
from jaxkv.models.mixers.mixer import MixerModule
from jaxkv.models.mixers.short_conv import ShortConvMixer
from jaxkv.models.mixers.space import SpaceMixer

MODULES: dict[type, type[MixerModule]] = {
    DeltaConfig: DeltaMixer, ShortConvConfig: ShortConvMixer, SpaceConfig: SpaceMixer,
}  # fmt: skip


def make_mixer(config: DecoderConfig, mixer: Mixer, dtype: Any, rngs: nnx.Rngs) -> MixerModule:
    """Makes the module of a mixer's config."""
    return MODULES[type(mixer)](config, mixer, dtype, rngs)
