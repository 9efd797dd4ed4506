"""The pytrees of a cache and where their arrays lie: on one device, over a mesh, over processes.

Stands on `config`. A new array of a cache goes into `state`; how an array is divided over devices into `sharding`.
"""
