"""`Engine(deterministic=True)` reaches the attention of every layer."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from checksum_model import LONGEST, Checksum, continuation
from flax import nnx

import jaxkv
from jaxkv._layers import attention
from jaxkv.models.config import DecoderConfig, LatentConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.rope import Rope

ROOM = {"max_seqs": 2, "max_seq_len": LONGEST, "block_size": 4, "num_blocks": 40}
PROMPT = [3, 4, 5]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Told(Checksum):
    """Notes what it was told when it was traced."""

    notes: list = dataclasses.field(default_factory=list, hash=False, compare=False)

    def __call__(self, tokens, *, cache, logits_at, deterministic=False):
        self.notes.append(deterministic)
        return super().__call__(tokens, cache=cache, logits_at=logits_at)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_model_is_told(deterministic):
    model, prefill = Told(), Told()
    engine = jaxkv.Engine(model, **ROOM, deterministic=deterministic, prefill=prefill)
    model.notes.clear()  # its shapes were looked at without the option
    request = engine.submit(PROMPT, 4)
    list(engine.run())
    assert request.tokens == continuation(model.windows, PROMPT, 4, None)
    assert {*model.notes, *prefill.notes} == {deterministic}


def test_a_model_that_takes_no_such_option_is_refused():
    for model, prefill in ((Checksum(), None), (Told(), Checksum())):
        with pytest.raises(ValueError, match=r"as those of jaxkv\.models do: Checksum takes no such option\.$"):
            jaxkv.Engine(model, **ROOM, deterministic=True, prefill=prefill)
    with pytest.raises(ValueError, match="deterministic must be True or False"):
        jaxkv.Engine(Told(), **ROOM, deterministic=1)


LATENT = LatentConfig(rank=8, rope_dim=4, nope_dim=4, value_dim=4)


@pytest.mark.parametrize(("scan", "latent"), [(False, None), (True, None), ("apart", None), (False, LATENT)])
def test_decoders_give_it_to_attention(scan, latent, monkeypatch):
    told = []

    def spy(*arguments, **options):
        told.append(options.get("deterministic", False))
        return attention(*arguments, **options)

    monkeypatch.setattr("jaxkv._layers.attention", spy)
    config = DecoderConfig(
        vocab_size=16, embed_dim=8, mlp_dim=8, num_heads=2, num_kv_heads=1 if latent is None else 2, max_seq_len=64,
        head_dim=4 if latent is None else 8, latent=latent,
        windows=(None,) * 2, ropes=(Rope(),) * 2, attention_scale=0.5,
    )  # fmt: skip
    model = Decoder(config, scan=scan, rngs=nnx.Rngs(0))
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=16))
    cache = jaxkv.extend(cache, [3])
    for deterministic in (True, False):
        told.clear()
        jax.eval_shape(lambda c, d=deterministic: model(jnp.array([PROMPT]), cache=c, deterministic=d), cache)
        assert told and set(told) == {deterministic}
