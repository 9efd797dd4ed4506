"""The `Cache` itself: made empty, read, checked, drawn. Nothing here changes which blocks a row holds.

Stands on `state`. A new way to look at a cache goes into `inspection`, a new invariant into `checks`.
"""
