# What must hold at the end of notebooks/02_sharing.ipynb: runs in its kernel.

jaxkv.check_invariants(cache)
prefix.check_invariants(cache)


def score(tokens):
    """The log-probability of tokens after the prompt, without any cache."""
    logits, _ = model(jnp.array([prompt + tokens]))
    logits = jax.nn.log_softmax(logits[0, len(prompt) - 1 : -1])
    return jnp.take_along_axis(logits, jnp.array(tokens)[:, None], axis=1).sum()


# What the cache computed is what the model says of the same text without one.
for row in range(4):
    assert jnp.allclose(score(samples[row]), STEPS * sample_scores[row], atol=1e-2)
    assert jnp.allclose(score(beams[row]), beam_scores[row], atol=1e-2)
assert len(set(map(tuple, beams))) == 4
assert max(best_of_blocks) < copies[-1] and max(beam_blocks) < max(best_of_blocks)

# Reuse changes nothing: the same tokens as without any cache.
for tokens, output in [(chat, first_answer), (second_turn, second_answer), *turns]:
    assert engine.recompute(tokens, output) == output
assert prefix.match(second_turn).num_tokens == (len(second_turn) - 1) // 16 * 16
assert prefix.match(second_turn, salt="another tenant").num_tokens == 0
assert engine.stats()["hit_rate"] > 0.5
assert step._cache_size() == 2  # chunks, and single tokens

assert held[:, 0].max() == 4 and held[-1, 1] == 15
for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    assert (x == y).all()
