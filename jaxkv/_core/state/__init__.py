"""The pytrees of a cache, and the placement of their arrays: on one device, a mesh, or several processes.

Stands on `config`. A new array of a cache goes into `state`; how an array is divided over devices into `sharding`.
"""
