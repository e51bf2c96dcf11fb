"""Runs whose memory or speed others have published, in the settings here that are nearest to each program's.

The settings belong to a program, are the same in all of its rows, and nothing in them is fitted. docs/plan.md
holds the published memory, in GB for FP8-LM and else in GiB. The machines' files hold the published speeds
(`[[measured]]`), each with the speed that `plan` calls the best: `python -m support.published`, in tests/,
writes that again after a change of the estimate. Sources of memory:

    FP8-LM        arXiv 2310.18313, table 5 (Megatron-LM; 32 H100)
    torchtitan    benchmarks/llama3_h100_202412_torchtitan.md; its selective recomputation is nearest to that
                  of every second block
    torchao       docs/source/workflows/training.md, H100
    llmq          the allocator's print, and which models fit which card, with its settings
"""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowgauge.distributed import ParallelDims
from narrowgauge.system.devices import imagine
from narrowgauge.trainer.cluster.plan.cluster_spec import MeasuredRun, load_cluster
from narrowgauge.trainer.cluster.plan.estimate import Estimate, estimate
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.runs import parallel_dims_of
from narrowgauge.trainer.simulate import StepEstimate, estimate_step
from narrowgauge.trainer.training import Config, make_config

ROOT = Path(__file__).parents[2]
ACROSS = ("tensor", "pipeline", "context")  # axes whose devices share one batch


@dataclass(frozen=True)
class Published:
    """The settings of one run."""

    name: str
    cluster: str  # whose kernels run; "": plain operations
    model: str | dict[str, Any]
    recipe: dict[str, Any]
    tokens: int = 8192
    micro_batch: int = 1
    every: int = 0  # recomputation
    batch: int = 0  # sequences of a step on one device; 0: one micro-batch
    parallel: dict[str, int] = field(default_factory=dict)

    @property
    def measured(self) -> MeasuredRun | None:
        """What its machine's file holds of its speed."""
        runs = load_cluster(self.cluster).measured if self.cluster else ()
        return next((run for run in runs if run.run == self.name), None)

    @property
    def devices(self) -> int:
        axes = (size for axis, size in self.parallel.items() if axis != "zero")
        return self.measured.devices if self.measured else math.prod(axes)

    @cached_property
    def config(self) -> Config:
        """The configuration here."""
        copies = self.devices // math.prod(self.parallel.get(axis, 1) for axis in ACROSS)
        training: dict[str, Any] = {"micro_batch_size": self.micro_batch}
        training["batch_size"] = (self.batch or self.micro_batch) * copies
        if self.every:
            training |= {"recompute": True, "recompute_every": self.every}
        model = {"name": self.model} if isinstance(self.model, str) else self.model
        values = {"model": model, "recipe": self.recipe, "training": training, "parallel": self.parallel}
        return make_config(values | {"data": {"sequence_length": self.tokens}})

    @property
    def mesh(self) -> ParallelDims:
        return parallel_dims_of(self.config, self.devices)

    @property
    def step(self) -> StepEstimate:
        """What a step takes."""
        with imagine(load_cluster(self.cluster).facts if self.cluster else None):
            return estimate_step(self.config, self.mesh)

    @cached_property
    def time(self) -> Estimate:
        """What `plan` reports."""
        return estimate(self.config, self.mesh, load_cluster(self.cluster), self.step)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return count_parameters(self.config.spec.model)

    @property
    def at_best(self) -> float:
        """Tokens/s of one device, at best."""
        return self.time.tokens / self.time.seconds / self.devices


GPT = {"name": "custom", "bias": True, "norm": "layer", "mlp": "gelu", "positions": "rope", "tied_head": True}
GPT |= {"vocab_size": 51200, "max_sequence_length": 2048}
#: Of FP8-LM: the model, the axes, sequences of a step and of a micro-batch on one device.
FP8_LM = {
    "7B": ({"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 16384}, {"shard": 32}, 64, 2),
    "13B": ({"dim": 5120, "layers": 40, "heads": 40, "ffn_dim": 20480}, {"shard": 16, "tensor": 2}, 128, 2),
    "175B": (
        {"dim": 12288, "layers": 96, "heads": 96, "ffn_dim": 49152},
        *({"shard": 4, "tensor": 8, "pipeline": 4}, 128, 1),
    ),
}
MEGATRON = {"weight": "bf16", "master": "fp32", "grad": "fp32", "gather": "bf16"}
MORE = "FP8, micro-batch 4"
PRECISIONS: dict[str, dict[str, str]] = {
    "BF16": {"name": "bf16"} | MEGATRON,
    "TE": {"name": "fp8"} | MEGATRON,
    "FP8": {"name": "msamp-o3"},
    MORE: {"name": "msamp-o3"},
}


def fp8_lm(size: str, precision: str) -> Published:
    sizes, axes, batch, micro = FP8_LM[size]
    micro, parallel = 4 if precision == MORE else micro, axes | {"zero": 1}
    name, recipe = f"FP8-LM {size} {precision}", PRECISIONS[precision]
    return Published(name, "", GPT | sizes, recipe, 2048, micro, batch=batch, parallel=parallel)


def llama(name: str, cluster: str, recipe: str, micro=2, every=2, tokens=8192, **parallel: int) -> Published:
    return Published(name, cluster, "llama3-8b", {"name": recipe}, tokens, micro, every, parallel=parallel)


def qwen(name: str, size: str, recipe: dict[str, str], micro: int, every: int, batch: int = 0) -> Published:
    return Published(name, "rtx4090", f"qwen2.5-{size.lower()}", recipe, 1024, micro, every, batch)


def llmq(what: str, size: str, micro: int, every: int = 0, **offload: str) -> Published:
    recipe = {"name": "bf16-sr", "m": "bf16", "v": "bf16", **offload}
    return qwen(f"llmq {size} {what}", size, recipe, micro, every)


ALL = {"offload": "master,grad,m,v"}
BF16 = {"name": "bf16"}
MEMORY = [
    fp8_lm("7B", "BF16"),
    fp8_lm("13B", "BF16"),
    llama("torchtitan 8B, 8 devices", "", "bf16", shard=8),
    llama("torchtitan 8B, 128 devices", "", "bf16", shard=128),
    llama("torchao 8B, 8 H100", "", "bf16", 1, shard=8),
    fp8_lm("175B", "BF16"),
    *[fp8_lm(size, precision) for size in FP8_LM for precision in ("TE", "FP8", MORE)],
    llama("torchtitan 8B, 8 devices, float8", "", "fp8", shard=8),
    llama("torchtitan 8B, 128 devices, float8", "", "fp8", shard=128),
    llama("torchtitan 8B, 32K tokens", "", "fp8", 1, 1, 32768, shard=8),
    llama("torchtitan 8B, 64K tokens", "", "fp8", 1, 1, 65536, shard=4, context=2),
    llama("Frontier 8B, 512 GCDs, 4 x 8192 in 64 GB", "", "bf16", 4, 1, shard=512),
    llmq("b8, block recompute", "0.5B", 8, 1),
    llmq("b12 in 16 GB", "0.5B", 12),
    llmq("b16 in 24 GB", "0.5B", 16),
    llmq("b4 in 24 GB", "1.5B", 4),
    llmq("b4 in 24 GB, master, m, v on the host", "3B", 4, offload="master,m,v"),
    llmq("b16 in 24 GB, all on the host", "7B", 16, 1, **ALL),
]


def one_card(program: str, size: str, recipe: str, micro: int, every: int = 0, **offload: str) -> Published:
    name = f"{program} {size}, 1 RTX 4090, {recipe}"
    return qwen(name, size, {"name": recipe, **offload}, micro, every, 512)


def llmc(size: str, cluster: str, micro: int, batch: int) -> Published:
    name, model, parallel = f"llm.c {size}, 8 {cluster.upper()}", f"gpt2-{size.lower()}", {"replicate": 8}
    return Published(name, cluster, model, BF16, 1024, micro, batch=batch, parallel=parallel)


SPEEDS = [
    llama("torchtitan 8B, 8 H100, bf16", "h100", "bf16"),
    llama("torchtitan 8B, 8 H100, float8", "h100", "fp8"),
    llama("torchtitan 8B, 128 H100, bf16", "h100", "bf16"),
    llama("torchtitan 8B, 128 H100, float8", "h100", "fp8"),
    Published("torchtitan 70B, 256 H100, float8", "h100", "llama3-70b", {"name": "fp8"}, 8192, 16, 1, 16,
              {"tensor": 8}),
    llama("torchao 8B, 8 H100, bf16", "h100", "bf16", 1),
    llama("torchao 8B, 8 H100, float8", "h100", "fp8", 1),
    llama("torchao 8B, 8 H100, float8 by row", "h100", "fp8-row", 1),
    llmc("124M", "h100", 64, 64),
    llmc("1558M", "h100", 16, 128),
    llama("torchtitan 8B, 32 H200, float8", "h200", "fp8"),
    llama("torchtitan 8B, 64 H200, float8", "h200", "fp8"),
    llama("torchao 8B, 8 B200, bf16", "b200", "bf16", 1),
    llama("torchao 8B, 8 B200, float8", "b200", "fp8", 1),
    llama("torchao 8B, 8 B200, mxfp8", "b200", "mxfp8", 1),
    llama("torchao 8B, 8 MI300X, bf16", "mi300x", "bf16", 1),
    llama("torchao 8B, 8 MI300X, float8", "mi300x", "fp8-fnuz", 1),
    llama("torchtitan 8B, 64 A100, bf16", "a100", "bf16", 1),
    llmc("124M", "a100", 64, 64),
    llmc("350M", "a100", 64, 64),
    llmc("774M", "a100", 32, 64),
    Published("TinyLlama 1.1B, 16 A100, bf16", "a100", "tinyllama-1.1b", BF16, 2048, 8),
    llama("torchtitan 8B, 8 nodes of Frontier", "frontier", "bf16", 1),
    llama("FSDP1 8B, 64 nodes of Frontier, 2024-09-05", "frontier", "bf16", 4, 1),
    llama("FSDP1 8B, 64 nodes of Frontier, with aws-ofi-rccl", "frontier", "bf16", 4, 1),
    llama("FSDP1 8B, 64 nodes of Frontier, ROCm 6.2", "frontier", "bf16", 4, 1),
    one_card("llmq", "0.5B", "bf16", 16),
    one_card("llmq", "0.5B", "fp8", 16),
    one_card("llmq", "1.5B", "bf16", 4),
    one_card("llmq", "1.5B", "fp8", 4),
    one_card("llmq", "7B", "bf16", 16, 1, **ALL),
    one_card("llmq", "7B", "fp8", 16, 1, **ALL),
    one_card("LLaMA-Factory", "0.5B", "bf16", 16),
    one_card("LLaMA-Factory", "1.5B", "bf16", 4),
    one_card("LLaMA-Factory", "7B", "bf16", 16, 1, **ALL),
]  # fmt: skip


def main() -> None:
    """Write the best speeds of all machines' files again; MI250X's run is one of Frontier's."""
    best = {row.name: f"{row.at_best:.0f}" for row in SPEEDS}
    for file in (ROOT / "src/narrowgauge/trainer/cluster/plan/machines").glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        for name, speed in best.items():
            text = re.sub(rf'(run = "{re.escape(name)}"[^\[]*?at_best = )[\d.]+', rf"\g<1>{speed}", text)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
