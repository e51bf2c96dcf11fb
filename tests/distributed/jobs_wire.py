"""What ranks do in the tests of bytes on the wire: whole optimizer steps of a run."""

import torch

from narrowgauge.data import Batch
from narrowgauge.distributed import Mesh, ParallelDims
from narrowgauge.distributed.comm.byte_counter import CommCounter
from narrowgauge.nn import Linear
from narrowgauge.training import make_config
from narrowgauge.training.step.trainer import Trainer

CPU = torch.device("cpu")
VOCABULARY, TOKENS = 64, 32


def a_step(recipe, layout, places=None, micro_batches=1):
    """What a later step of a run sends, and the sizes of what it holds: (bytes, elements, others)."""
    layout = ParallelDims(**layout)
    model = {"name": "gpt2-debug", "dim": 64, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_dim": 128}
    config = make_config(
        {
            "model": model | {"vocab_size": VOCABULARY, "max_sequence_length": TOKENS},
            "data": {"sequence_length": TOKENS},
            "training": {"batch_size": layout.data * micro_batches, "micro_batch_size": 1, "device": "cpu"},
            "recipe": {"name": recipe, **(places or {})},
        }
    )
    trainer = Trainer.begin(config.plan, CPU, Mesh(layout, CPU))
    ids = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    batches = [Batch(ids[:, :-1], ids[:, 1:], TOKENS)] * micro_batches
    for _ in range(2 if layout.replicate > 1 else 1):  # DDP lays its buckets again after the first
        trainer.train_step(iter(batches))
    with CommCounter() as traffic:
        trainer.train_step(iter(batches))
    narrow = {
        id(layer.weight): layer.weight.numel()
        for layer in trainer.model.blocks.modules()
        if isinstance(layer, Linear)
    }
    everything = sum(p.numel() for p in trainer.model.parameters())
    in_blocks = sum(p.numel() for p in trainer.model.blocks.parameters())
    elements = {"matrices": sum(narrow.values()), "blocks": in_blocks, "all": everything}
    return {"sent": traffic.sent, "calls": traffic.calls, "elements": elements}
