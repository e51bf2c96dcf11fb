"""How do ranks sum and shard narrow tensors? Meshes, and DDP and FSDP2 for a loop of one's own.

Needs torch alone. How processes start, meet and end, and the parallel engine, are in
`narrowgauge.trainer.distributed`.
"""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.distributed.byte_counter import CommCounter as CommCounter
    from narrowgauge.distributed.data_parallel import fully_shard as fully_shard
    from narrowgauge.distributed.data_parallel import prepare_ddp as prepare_ddp
    from narrowgauge.distributed.dims import ParallelDims as ParallelDims
    from narrowgauge.distributed.dims import resolve_dims as resolve_dims
    from narrowgauge.distributed.mesh import Mesh as Mesh
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
