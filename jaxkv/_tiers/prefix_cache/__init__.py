"""`PrefixCache`: an index of blocks by their tokens, their eviction, and their spilling to host and disk.

Stands on `_tiers`. A policy of which blocks are kept goes into `ends`, a change of index and cache into `transaction`.
"""
