"""Static facts of a cache: layers, sizes, storage formats, what a layer retains, and bytes. No device arrays.

Anybody may import it. A new option of a layer goes into `layer_config`, its bytes into `byte_sizes`, checks of single
values into `validation`.
"""
