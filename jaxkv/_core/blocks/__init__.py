"""Changes to the blocks that a row holds: allocation, sharing, rollback, eviction, copies.

Stands on `cache`. A new function that moves blocks between rows and the free list goes here, on top of `allocator`.
"""
