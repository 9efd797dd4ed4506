"""Where blocks can go besides the device's rows: the host's memory, other caches, and an index that shares them.

Stands on `_core` and `_files`. A new tier goes here; what a saved file holds does not.
"""
