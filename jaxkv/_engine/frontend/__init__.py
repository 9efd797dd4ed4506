"""What users call: `Engine`, `generate`, checkpoints, traces, and one engine over data-parallel devices.

Stands on `runner`. An option of `Engine` is read in `build`.
"""
