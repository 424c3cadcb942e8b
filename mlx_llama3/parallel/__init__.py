"""One model on several machines, over `mx.distributed` (ring over TCP or Thunderbolt, JACCL over RDMA).

`mlx.launch` starts the same command on every machine. Rank 0 reads the input, samples and prints, as on one machine.
The other ranks are workers. Each rank holds a shard of the model: some rows or columns of every matrix (`tensor`), or
some of the layers (`pipeline`). Rank 0 broadcasts every pass before it runs it (`rank0`), and each worker runs the pass
on its shard (`worker`).
"""

from mlx_llama3.parallel.worker import run_worker
from mlx_llama3.parallel.world import World

__all__ = ["World", "run_worker"]
