"""Families with experts in place of MLPs, in all layers or in some."""
