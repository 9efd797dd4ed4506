"""`PrefixCache`: an index of blocks by the tokens that they hold, their eviction, and their way to host and disk.

Stands on `_tiers`. A policy of which blocks are kept goes into `ends`, a change of index and cache into `transaction`.
"""
