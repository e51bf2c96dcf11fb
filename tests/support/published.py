"""Memory that others have published, and the settings here that are nearest to each program's.

The settings belong to a program, are the same in all of its rows, and nothing in them is fitted. Sources:

    FP8-LM        arXiv 2310.18313, table 5 (Megatron-LM; 32 H100), GB
    torchtitan    benchmarks/llama3_h100_202412_torchtitan.md, GiB; its selective recomputation is nearest to
                  that of every second block
    torchao       docs/source/workflows/training.md, H100, GB
    llmq          the allocator's print, and which models fit which card, with its settings
"""

from dataclasses import dataclass, field
from typing import Any

from narrowgauge.distributed import ParallelDims
from narrowgauge.recipes import named_device
from narrowgauge.system.devices import imagine
from narrowgauge.trainer.simulate import estimate_step
from narrowgauge.trainer.training import make_config

GB, GIB = 10**9, 2**30
GPT = {"name": "custom", "bias": True, "norm": "layer", "mlp": "gelu", "positions": "rope", "tied_head": True}
GPT |= {"vocab_size": 51200, "max_sequence_length": 2048}
SIZES = {
    "7B": GPT | {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 16384},
    "13B": GPT | {"dim": 5120, "layers": 40, "heads": 40, "ffn_dim": 20480},
    "175B": GPT | {"dim": 12288, "layers": 96, "heads": 96, "ffn_dim": 49152},
}
MESHES = {
    "7B": {"shard": 32, "zero": 1},
    "13B": {"shard": 16, "tensor": 2, "zero": 1},
    "175B": {"shard": 4, "tensor": 8, "pipeline": 4, "zero": 1},
}
MEGATRON = {"weight": "bf16", "master": "fp32", "grad": "fp32", "gather": "bf16"}
PRECISIONS = {
    "BF16": {"name": "bf16"} | MEGATRON,
    "TE": {"name": "fp8"} | MEGATRON,
    "FP8": {"name": "msamp-o3"},
}
MORE = "FP8, micro-batch 4"
FP8_LM = {  # GB, with micro-batches of 2, of 1 for 175B
    "7B": {"BF16": 69.6, "TE": 77.3, "FP8": 49.4, MORE: 69.3},
    "13B": {"BF16": 68.2, "TE": 76.4, "FP8": 48.9, MORE: 67.8},
    "175B": {"BF16": 66.1, "TE": 69.6, "FP8": 40.3, MORE: 57.7},
}


@dataclass(frozen=True)
class Row:
    """One published figure; `most`: the model fitted in so much memory, and no more is known."""

    name: str
    size: float
    unit: int
    model: dict[str, Any]
    tokens: int
    micro_batch: int
    recipe: dict[str, Any]
    mesh: dict[str, int] = field(default_factory=dict)
    batch: int = 0
    recompute_every: int = 0
    most: bool = False
    gpu: str = ""  # whose path is counted, with its kernels; else plain operations

    def expected(self) -> float:
        """What this program would take, in the row's unit."""
        parallel_dims = ParallelDims(**self.mesh)
        training: dict[str, Any] = {"micro_batch_size": self.micro_batch}
        training["batch_size"] = self.batch or self.micro_batch * parallel_dims.data
        if self.recompute_every:
            training |= {"recompute": True, "recompute_every": self.recompute_every}
        values = {"model": self.model, "recipe": self.recipe, "training": training}
        config = make_config(values | {"data": {"sequence_length": self.tokens}})
        with imagine(named_device(self.gpu) if self.gpu else None):
            return estimate_step(config, parallel_dims).memory.peak / self.unit


def fp8_lm(size: str, precision: str) -> Row:
    micro_batch = 4 if precision == MORE else 1 if size == "175B" else 2
    name = f"FP8-LM {size} {precision}"
    batch = 512 if size == "175B" else 2048
    of, recipe = FP8_LM[size][precision], PRECISIONS[precision.partition(",")[0]]
    return Row(name, of, GB, SIZES[size], 2048, micro_batch, recipe, MESHES[size], batch)


def llama(
    name: str, gib: float, mesh: dict[str, int], recipe: str, tokens=8192, micro_batch=2, every=2
) -> Row:
    model = {"name": "llama3-8b"}
    return Row(name, gib, GIB, model, tokens, micro_batch, {"name": recipe}, mesh, 0, every)


LLMQ = {"name": "bf16-sr", "m": "bf16", "v": "bf16"}


def llmq(name: str, gib: float, size: str, batch: int, every: int, offload: str = "", most=True) -> Row:
    recipe = LLMQ | ({"offload": offload} if offload else {})
    model = {"name": f"qwen2.5-{size}"}
    return Row(f"llmq {name}", gib, GIB, model, 1024, batch, recipe, {}, 0, every, most, "rtx4090")


WIDE = [
    fp8_lm("7B", "BF16"),
    fp8_lm("13B", "BF16"),
    llama("torchtitan 8B, 8 devices", 82.4, {"shard": 8}, "bf16"),
    llama("torchtitan 8B, 128 devices", 67.0, {"shard": 128}, "bf16"),
    llama("torchao 8B, 8 H100", 47.65e9 / GIB, {"shard": 8}, "bf16", micro_batch=1),
]
FITS = [
    Row(
        "Frontier 8B, 512 GCDs, 4 x 8192 in 64 GB",
        64e9 / GIB,
        GIB,
        {"name": "llama3-8b"},
        8192,
        4,
        {"name": "bf16"},
        {"shard": 512},
        recompute_every=1,
        most=True,
    )
]
LLMQ_ROWS = [
    llmq("0.5B b8, block recompute", 8874 * 2**20 / GIB, "0.5b", 8, 1, most=False),
    llmq("0.5B b12 in 16 GB", 16e9 / GIB, "0.5b", 12, 0),
    llmq("0.5B b16 in 24 GB", 24e9 / GIB, "0.5b", 16, 0),
    llmq("1.5B b4 in 24 GB", 24e9 / GIB, "1.5b", 4, 0),
    llmq("3B b4 in 24 GB, master, m, v on the host", 24e9 / GIB, "3b", 4, 0, "master,m,v"),
    llmq("7B b16 in 24 GB, all on the host", 24e9 / GIB, "7b", 16, 1, "master,grad,m,v"),
]
NARROW = [
    fp8_lm("175B", "BF16"),
    *[fp8_lm(size, precision) for size in SIZES for precision in ("TE", "FP8", MORE)],
    llama("torchtitan 8B, 8 devices, float8", 76.8, {"shard": 8}, "fp8"),
    llama("torchtitan 8B, 128 devices, float8", 61.8, {"shard": 128}, "fp8"),
    llama("torchtitan 8B, 32K tokens", 83.9, {"shard": 8}, "fp8", 32768, 1, 1),
    llama("torchtitan 8B, 64K tokens", 84.2, {"shard": 4, "context": 2}, "fp8", 65536, 1, 1),
]
