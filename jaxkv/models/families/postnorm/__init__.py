"""Families whose layers have norms behind attention and behind the MLP."""
