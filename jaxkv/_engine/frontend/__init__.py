"""What users hold: `Engine`, `generate`, checkpoints, traces, one engine over data-parallel devices.

Stands on `runner`. An option of `Engine` is read in `build`.
"""
