"""The `Cache` itself: how to make, read, check and draw one. Nothing here changes the blocks that a row holds.

Stands on `state`. A new way to look at a cache goes into `inspection`, a new invariant into `checks`.
"""
