"""Saved caches: the file format, and saving to and loading from it.

Imports `_core`. A new version of the file begins in `format`; older versions must go on loading.
"""
