# What must hold at the end of notebooks/07_chat.ipynb: runs in its kernel.

assert len(users) == USERS and all(len(user.requests) == 2 for user in users)
assert [u.said for u in users] == [u.said for u in plain_users]
assert len(waits) == 2 * USERS and min(waits) > 0 and tokens == sum(len(r.tokens) for u in users for r in u.requests)
assert stats["hit_rate"] > 0.3 and stats["tokens"] < plain.stats()["tokens"]
assert trace.blocks_in_use[-1] == 0 and (trace.owners() == -3).any()
