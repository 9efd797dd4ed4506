# What must hold at the end of notebooks/04_keep_less.ipynb: runs in its kernel.

assert everything.all()
for name in ("snapkv", "observed_attention", "expected_attention", "keydiff"):
    assert found[name, 0.5][0] > 0.95 and found[name, 0.25][0] > found["streaming_llm", 0.25][0] + 0.3
assert found["snapkv", 0.12][0] > 0.95 > found["snapkv", 0.12][1]  # what was asked for before, and little else

# Blocks in use are what the kept tokens fill, and not one more.
for share in shares:
    assert blocks["keydiff", share] == ROWS * 8 * -(-int(share * SEEN) // 16)
assert thinned.blocks_in_use == (-(-held // 16)).sum() and held.sum() <= 8 * ROWS * mean
assert used[-1] == ROWS * 8 * 256 // 16 and max(used) == ROWS * 8 * 384 // 16
assert held[0, :, :2].max() < mean // 2 < mean < held[0, :, 2:].min() and while_reading.mean() > 0.9
for cache in (full["head"], thinned):
    jaxkv.check(cache)
    jaxkv.check_invariants(cache)

assert (by_quest <= at_best + 1e-6).all() and (np.diff(by_quest) > 0).all() and by_quest[2] > latest[2]
