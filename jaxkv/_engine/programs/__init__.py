"""Compiled programs that an engine runs on the device. Each takes a cache, donated, and returns the next one.

Stands on `requests`. Work that is done between steps goes into `maintenance`, work within a step into `step`.
"""
