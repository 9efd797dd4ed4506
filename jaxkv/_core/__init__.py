"""What a cache is: its config, its state, and the pure functions that make a new one of it.

Knows nothing but `pallas_kernels`. Data flows one way: config, state, tables, plan, attention, kernels. A new dtype
begins in `layer` and `pallas_kernels.kinds`, a new kind of layer in `LayerConfig` and in its group's rule of giving
back (`groups`, `tables.leave_windows`).
"""
