"""Sequences that outgrow `max_seq_len` in an engine, where all layers have windows and nothing else keeps them."""

import pytest
from flax import nnx
from nightly import NIGHTLY

import jaxkv
from jaxkv.models import Decoder, DecoderConfig, Rope

SIZES = dict(max_seqs=2, max_seq_len=32, block_size=4, step_tokens=12)
PROMPTS = [list(range(1, 7)), [9, 3] * 25]  # the second is longer than max_seq_len
COUNT = 70


def make_model(windows):
    return Decoder(
        DecoderConfig(
            family="llama", num_kv_heads=1, head_dim=8, windows=windows, num_heads=2, embed_dim=16, mlp_dim=24,
            vocab_size=61, max_seq_len=512, ropes=(Rope(),) * 2, attention_scale=0.4,
        ),
        rngs=nnx.Rngs(0),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return make_model((8, 6))


@pytest.fixture(scope="module")
def wanted(model):
    """What rows that are long enough give."""
    with jaxkv.Engine(model, **SIZES | {"max_seq_len": 128}) as engine:
        return [engine.submit(prompt, COUNT).result() for prompt in PROMPTS]


WAYS = {
    "plain": {}, "prefix cache": {"prefix_cache": True}, "several steps and guesses": {"draft": "ngram"},
    "few blocks": {"num_blocks": 8, "swap": "always", "steps_per_dispatch": 3},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["plain"])
def test_sequences_go_on(model, wanted, way, tmp_path):
    with jaxkv.Engine(model, **SIZES | WAYS[way]) as engine:
        requests = [engine.submit(prompt, COUNT) for prompt in PROMPTS]
        assert engine.config.is_endless and [r.result() for r in requests] == wanted
        assert [r.ended for r in requests] == ["length"] * 2
        if way == "plain":  # saved in the middle, beyond max_seq_len
            request = engine.submit(PROMPTS[1], COUNT)
            for _ in range(30):
                engine.step()
            assert 0 < len(request.tokens) < COUNT
            engine.save(tmp_path / "engine.safetensors")
            other = jaxkv.Engine(model, **SIZES)
            (again,) = other.load(tmp_path / "engine.safetensors")
            assert again.result() == wanted[1]
            assert engine.recompute(PROMPTS[1], wanted[1]) == wanted[1]


KEEPS = {
    "hook": {"logits_hook": lambda logits, rows: logits}, "evict": {"evict": jaxkv.Eviction("streaming_llm", 0.5)},
    "a layer that sees all": {},
}  # fmt: skip


@pytest.mark.parametrize("keeps", KEEPS if NIGHTLY else ["hook"])
def test_who_keeps_all_tokens_ends_at_max_seq_len(model, keeps):
    model = model if keeps == "hook" else make_model((None, 8))
    with jaxkv.Engine(model, **SIZES, **KEEPS[keeps]) as engine:
        assert len(engine.submit(PROMPTS[0], COUNT).result()) == SIZES["max_seq_len"] - len(PROMPTS[0])
        with pytest.raises(ValueError, match="it has 50 tokens, and max_seq_len = 32 must hold one more"):
            engine.submit(PROMPTS[1], 3)
