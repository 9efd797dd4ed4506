"""What runs a schedule on a device: who holds which rows, steps under way, prompts computed apart.

Stands on `programs`. The order of what happens between two steps is in `engine_core`.
"""
