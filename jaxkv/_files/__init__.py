"""What a saved file of a cache holds, and how it gets into another.

Stands on `_core`. A new version of the file begins in `format`; older ones must go on loading.
"""
