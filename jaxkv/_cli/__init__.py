"""The commands of `python -m jaxkv`: one file for each command, and shared helpers.

Imports everything else; nothing imports this package.
"""
