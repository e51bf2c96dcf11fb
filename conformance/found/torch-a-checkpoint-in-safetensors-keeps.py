"""torch 2.13.0: a checkpoint in safetensors keeps one slice of a tensor for each rank.

`HuggingFaceStorageWriter` names a slice by its tensor alone (`distributed/checkpoint/filesystem.py:451`,
`tensor_dict[write_item.index.fqn]`), so of two slices on a rank the last remains. Save and load raise
nothing, and the lost rows keep the values they had before the load. Due: "every rank saves its own shard"
(the documentation of `save_distributed`), so [1.0, 1.0, 2.0, 2.0].
"""

import tempfile, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
folder, rows = tempfile.mkdtemp(), (torch.full((2, 4), 1.0), torch.full((2, 4), 2.0))
shards = [Shard.from_tensor_and_offsets(part, [2 * i, 0], 0) for i, part in enumerate(rows)]
state, read = {"w": init_from_local_shards(shards, 4, 4)}, {"w": torch.zeros(4, 4)}
dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))
dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(folder))
print(read["w"][:, 0].tolist())
# prints:
#   [0.0, 0.0, 2.0, 2.0]
