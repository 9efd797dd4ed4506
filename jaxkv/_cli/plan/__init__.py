"""`python -m jaxkv plan`: what fits into memory, and what a decode step takes on a chip, computed from shapes alone.

`command` reads the options, `capacity` and `decode_step` compute, `report` writes text and JSON.
"""
