"""Runs a schedule on a device: cache manager, model runner with in-flight steps, disaggregated prefill.

Stands on `programs`. The order of what happens between two steps is in `engine_core`.
"""
