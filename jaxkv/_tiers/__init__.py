"""Where blocks can go besides the device's rows: an index that shares them, and the host's memory.

Stands on `_core`. A new tier goes here; what a saved file holds does not.
"""
