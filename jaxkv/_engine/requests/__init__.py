"""Requests and the schedule on the host, in plain Python: no device arrays but those of `sampling`.

Stands on `_core`. A policy of who is served next goes into `scheduler`, a sampling option into `sampling`.
"""
