"""Families of which some layers keep a state instead of keys and values."""
