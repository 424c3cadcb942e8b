"""One model on several machines, over `mx.distributed` (ring over TCP or Thunderbolt, JACCL over RDMA).

`mlx.launch` starts the same command on every machine. Rank 0 is in front: it reads the person, samples and prints, as
on one machine. The others hold their part of the model and follow: before every pass rank 0 tells them what it is about
to run (`rank0`, `worker`), and each runs its part of it (`tensor`: rows and columns of every matrix; `pipeline`:
some of the layers).
"""

from mlx_llama3.parallel.worker import run_worker
from mlx_llama3.parallel.world import World

__all__ = ["World", "run_worker"]
