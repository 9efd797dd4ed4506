# What must hold at the end of notebooks/06_functions.ipynb: runs in its kernel.

jaxkv.check_invariants(cache)

# The same tokens as without any cache.
for tokens, text in zip(encoded, texts, strict=True):
    logits, _ = model(jnp.array([tokens + text]))
    assert jnp.argmax(logits[0, len(tokens) - 1 : -1], axis=-1).tolist() == text

assert forked == (1 if cache.lengths[2] % config.block_size else 0)
assert cache.lengths[1] == 0 and cache.lengths[3] == cache.lengths[2]
assert stats["blocks_shared"] == cache.lengths[2] // config.block_size
assert used < config.dense_bytes / 2
assert plain.alias_size_in_bytes == 0
assert donated.alias_size_in_bytes >= cache.bytes
assert jit_step._cache_size() == 2  # one compile for the prompts, one for all decoding
