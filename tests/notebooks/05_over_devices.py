# What must hold at the end of notebooks/05_over_devices.ipynb: runs in its kernel.

assert answers["2 devices, heads"] == answers["one device"] == answers["2 x 2, heads and tokens"] == sent
for cache, count in ((by_heads, 8), (by_tokens, 8), (by_both, 8)):
    assert held(cache) == [pool_bytes // count] * count
assert {len(np.unique(row)) for row in rows_of(by_heads)} == {8}
assert {len(np.unique(row)) for row in rows_of(by_row)} == {1}
for row in rows_of(by_both):  # heads on one half of the devices each, the runs of a block on four
    assert len(np.unique(row[: HEADS // 2])) == 4 and not set(row[0]) & set(row[-1])
assert crossing["heads"] == crossing["rows"] == [] and [op for op, _ in crossing["tokens"]] == ["all-gather"]
assert all(size < pool_bytes / 4 for found in crossing.values() for _, size in found)
for cache in (by_heads, by_tokens, by_both, target):
    jaxkv.check(cache)
    jaxkv.check_invariants(cache)
assert target.lengths.tolist()[:2] == [61, 37]
