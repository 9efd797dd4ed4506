"""Where blocks can go besides the device's rows: an index that shares them, the host's memory, and files.

Stands on `_core` and `_files`. A new tier goes here; what a saved file holds does not.
"""
