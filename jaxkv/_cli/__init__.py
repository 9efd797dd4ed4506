"""The front door of `python -m jaxkv`: one file for each command, and what they share.

Stands on everything else; nothing imports it.
"""
