"""A tiny checkpoint that speaks random bytes, and chats."""

import jax
import pytest
from flax import nnx

from jaxkv import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from text.test_tokenizer import CHATML, write_tokenizer

    folder = tmp_path_factory.mktemp("model")
    config = models.DecoderConfig(
        vocab_size=260, embed_dim=16, mlp_dim=24, num_heads=2, num_kv_heads=1, head_dim=8, windows=[None],
        ropes=[models.Rope()], max_seq_len=4096, attention_scale=8**-0.5, eos_ids=(257,),
    )  # fmt: skip
    models.save(models.Decoder(config, rngs=nnx.Rngs(jax.random.key(3))), folder)
    return write_tokenizer(folder, CHATML)
