"""A process that computes prompts for engines in others, until it is killed: `prefill_worker.py NUMBER PORT WINDOWS`.

It has two devices, blocks of another size, and a prefix cache.
"""

import json
import sys
import threading

import jax
import numpy as np
from checksum_model import LONGEST, Divided, Placed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv

if __name__ == "__main__":
    windows = tuple(json.loads(sys.argv[3]))
    mesh = Mesh(np.array(jax.devices()), ("model",))
    model = Placed(jax.device_put(np.zeros((), np.float32), NamedSharding(mesh, PartitionSpec())), Divided(windows))
    sizes = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 4, "step_tokens": 8}
    engine = jaxkv.Engine(model, **sizes, prefix_cache=True)
    with engine.serve_prefill(f"127.0.0.1:{sys.argv[2]}") as address:
        print("address:", address, flush=True)
        threading.Event().wait()
