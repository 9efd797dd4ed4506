# What must hold at the end of notebooks/03_your_model.ipynb: runs in its kernel.

assert added <= 12
assert (paged_tokens == dense_tokens).all() and first.tolist() == dense_tokens[:, 0].tolist()
jaxkv.check(paged_cache)
jaxkv.check_invariants(paged_cache)

# Left pads changed nothing: each row is what the model says to it alone.
for row, text in zip(encoded, paged_tokens.tolist(), strict=True):
    logits, _ = trained(jnp.array([row + text]))
    assert jnp.argmax(logits[0, len(row) - 1 : -1], axis=-1).tolist() == text

assert trace.blocks_in_use.max() <= 48 and trace.blocks_in_use[-1] == 0 and (trace.owners() == -3).any()
assert [len(answer) for answer in answers] == [n for _, n in requests] and len(paged) < len(static)
assert samples.lengths.tolist() == [int(paged_cache.lengths[0])] * 4 and picked.lengths.tolist()[2] == 0
assert paged_mib[0] < dense_mib[0] / 4
assert like.num_blocks == 8 * 2048 // 16
assert scanned_cache.lengths.tolist() == counts.tolist() and variable.lengths.tolist() == [5, 3]

# The engine's answers are those of the model that the decoder was made from.
first_of_each = jaxkv.generate(trained, [prompt for prompt, _ in requests], max_new_tokens=5, max_seqs=6, longest=256)
assert first_of_each == [answer[:5] for answer in answers]
