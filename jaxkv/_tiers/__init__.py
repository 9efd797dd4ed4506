"""Tiers of storage beyond a cache's rows: host memory, other caches, and an index that shares blocks.

Stands on `_core` and `_files`. A new tier goes here; what a saved file holds does not.
"""
