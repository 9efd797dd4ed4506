"""Families whose layers have norms before attention and before the MLP."""
