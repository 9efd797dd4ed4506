"""Families with experts in place of MLPs, and sliding windows in some layers."""
