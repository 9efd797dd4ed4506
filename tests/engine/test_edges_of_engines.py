"""An engine's cache between steps, and logits in another dtype."""

import jax.numpy as jnp
from checksum_model import Checksum, continuation

import jaxkv
import jaxkv.models


def test_the_cache_is_sound_between_steps_where_windows_are_left():
    windows, prompt = (None, 7), [5, 7, 11, 2] * 8
    engine = jaxkv.Engine(Checksum(windows=windows), max_seqs=2, max_seq_len=48, block_size=2, step_tokens=16)
    request = engine.submit(prompt, 8)
    while not request.done:
        engine.step()
        jaxkv.check_invariants(engine.cache)
    assert request.tokens == continuation(windows, prompt, 8, None)


def test_beams_of_a_model_whose_logits_are_narrower():
    model = jaxkv.models.small()
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=32, num_blocks=8))
    cache = jaxkv.extend(cache, [3, 3])
    logits, cache = model(jnp.array([list(b"def")] * 2), cache=cache)
    wide, narrow = (
        jaxkv.beam_search(model, cache, logits[:, -1].astype(dtype), beams=2, max_new_tokens=3)[0].tokens
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert wide.shape == narrow.shape == (1, 2, 3)
