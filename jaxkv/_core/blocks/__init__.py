"""Which blocks a row holds: room for tokens, sharing, roll back, eviction, copies of blocks.

Stands on `cache`. A new function that moves blocks between rows and the free list goes here, on top of `allocator`.
"""
