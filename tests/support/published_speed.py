"""Speeds that others have published, and the settings here that are nearest to each program's.

Nothing in the settings is fitted. Tokens/s count one device. The machines' files repeat the figures
(`[[measured]]`), each with the speed that `plan` calls the best: `python -m support.published_speed`, in
tests/, writes them again after a change of the estimate.
"""

import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowgauge.system.devices import imagine
from narrowgauge.trainer.cluster.plan.cluster_spec import load_cluster
from narrowgauge.trainer.cluster.plan.estimate import Estimate, estimate
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.runs import parallel_dims_of
from narrowgauge.trainer.simulate import estimate_step
from narrowgauge.trainer.training import Config, make_config

SOURCES = {
    "torchtitan 8B, 8 nodes of Frontier": "github.com/eminorhan/frontier-torchtitan, README",
    "torchtitan 8B, 64 A100": "github.com/pytorch/torchtitan, docs/performance.md of 2024-04",
    "torchtitan 8B, 32 H200": "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    "torchtitan 8B, 64 H200": "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
    "torchtitan": "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
    "torchao": "github.com/pytorch/ao, docs/source/workflows/training.md",
    "llm.c 124M, 8 H100": "github.com/KellerJordan/modded-nanogpt, records/track_1_short/2024-10-13_llmc",
    "llm.c": "github.com/karpathy/llm.c, scripts/run_*.sh",
    "TinyLlama": "github.com/jzhang38/TinyLlama, README",
    "FSDP1": "github.com/eminorhan/frontier-guide, README",
    "llmq": "github.com/IST-DASLab/llmq, README",
    "LLaMA-Factory": "github.com/IST-DASLab/llmq, README",
}


_TIMES: dict[str, Estimate] = {}


@dataclass(frozen=True)
class Speed:
    """One published speed, and the settings of the run."""

    name: str
    cluster: str
    devices: int
    tokens_per_s: float
    model: str
    recipe: str = "bf16"
    tokens: int = 8192
    micro_batch: int = 1
    batch: int = 0  # sequences of a step on one device; 0: one micro-batch
    every: int = 0  # recomputation
    offload: str = ""
    parallel: dict[str, int] = field(default_factory=dict)

    @cached_property
    def config(self) -> Config:
        """The configuration here."""
        data = self.devices
        for axis in ("tensor", "pipeline", "context"):
            data //= self.parallel.get(axis, 1)
        training: dict[str, Any] = {"micro_batch_size": self.micro_batch}
        training["batch_size"] = (self.batch or self.micro_batch) * data
        if self.every:
            training |= {"recompute": True, "recompute_every": self.every}
        recipe = {"name": self.recipe} | ({"offload": self.offload} if self.offload else {})
        return make_config(
            {"model": {"name": self.model}, "recipe": recipe, "training": training, "parallel": self.parallel}
            | {"data": {"sequence_length": self.tokens}}
        )

    @property
    def source(self) -> str:
        """The place of its publication."""
        return next(source for start, source in SOURCES.items() if self.name.startswith(start))

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return count_parameters(self.config.spec.model)

    @property
    def time(self) -> Estimate:
        """What `plan` reports for its settings; several programs can share settings."""
        settings = repr(replace(self, name="", tokens_per_s=0.0))
        if settings not in _TIMES:
            mesh, cluster = parallel_dims_of(self.config, self.devices), load_cluster(self.cluster)
            with imagine(cluster.facts):
                step = estimate_step(self.config, mesh)
            _TIMES[settings] = estimate(self.config, mesh, cluster, step)
        return _TIMES[settings]

    @property
    def at_best(self) -> float:
        """Tokens/s of one device, at best."""
        return self.time.tokens / self.time.seconds / self.devices


def titan(name: str, cluster: str, devices: int, speed: float, recipe: str = "bf16", micro: int = 2) -> Speed:
    return Speed(name, cluster, devices, speed, "llama3-8b", recipe, micro_batch=micro, every=2)


def qwen(
    program: str, size: str, recipe: str, speed: float, micro: int, every: int = 0, offload: str = ""
) -> Speed:
    name = f"{program} {size.upper()}, 1 RTX 4090, {recipe}"
    return Speed(name, "rtx4090", 1, speed, f"qwen2.5-{size}", recipe, 1024, micro, 512, every, offload)


def llmc(size: str, cluster: str, speed: float, micro: int, batch: int) -> Speed:
    name = f"llm.c {size}, 8 {cluster.upper()}"
    return Speed(
        name, cluster, 8, speed, f"gpt2-{size.lower()}", "bf16", 1024, micro, batch, parallel={"replicate": 8}
    )


def frontier_guide(name: str, speed: float) -> Speed:
    return Speed(
        f"FSDP1 8B, 64 nodes of Frontier{name}", "frontier", 512, speed, "llama3-8b", micro_batch=4, every=1
    )


ROWS = [
    titan("torchtitan 8B, 8 H100, bf16", "h100", 8, 6667),
    titan("torchtitan 8B, 8 H100, float8", "h100", 8, 8532, "fp8"),
    titan("torchtitan 8B, 128 H100, bf16", "h100", 128, 6514),
    titan("torchtitan 8B, 128 H100, float8", "h100", 128, 8380, "fp8"),
    Speed(
        "torchtitan 70B, 256 H100, float8", "h100", 256, 829, "llama3-70b", "fp8", 8192, 16, 16, 1,
        parallel={"tensor": 8},
    ),
    titan("torchao 8B, 8 H100, bf16", "h100", 8, 6150, micro=1),
    titan("torchao 8B, 8 H100, float8", "h100", 8, 7689.5, "fp8", micro=1),
    titan("torchao 8B, 8 H100, float8 by row", "h100", 8, 6768, "fp8-row", micro=1),
    llmc("124M", "h100", 468_000, 64, 64),
    llmc("1558M", "h100", 48_000, 16, 128),
    titan("torchtitan 8B, 32 H200, float8", "h200", 32, 10_938, "fp8"),
    titan("torchtitan 8B, 64 H200, float8", "h200", 64, 10_753, "fp8"),
    titan("torchao 8B, 8 B200, bf16", "b200", 8, 8307.5, micro=1),
    titan("torchao 8B, 8 B200, float8", "b200", 8, 10_417, "fp8", micro=1),
    titan("torchao 8B, 8 B200, mxfp8", "b200", 8, 9969, "mxfp8", micro=1),
    titan("torchao 8B, 8 MI300X, bf16", "mi300x", 8, 5376.5, micro=1),
    titan("torchao 8B, 8 MI300X, float8", "mi300x", 8, 6166, "fp8-fnuz", micro=1),
    titan("torchtitan 8B, 64 A100, bf16", "a100", 64, 2973, micro=1),
    llmc("124M", "a100", 218_000, 64, 64),
    llmc("350M", "a100", 80_000, 64, 64),
    llmc("774M", "a100", 38_600, 32, 64),
    Speed("TinyLlama 1.1B, 16 A100, bf16", "a100", 16, 24_000, "tinyllama-1.1b", "bf16", 2048, 8),
    titan("torchtitan 8B, 8 nodes of Frontier", "frontier", 64, 1333, micro=1),
    frontier_guide(", 2024-09-05", 345),
    frontier_guide(", with aws-ofi-rccl", 426),
    frontier_guide(", ROCm 6.2", 537),
    qwen("llmq", "0.5b", "bf16", 39_800, 16),
    qwen("llmq", "0.5b", "fp8", 47_600, 16),
    qwen("llmq", "1.5b", "bf16", 14_100, 4),
    qwen("llmq", "1.5b", "fp8", 20_300, 4),
    qwen("llmq", "7b", "bf16", 2_780, 16, 1, "master,grad,m,v"),
    qwen("llmq", "7b", "fp8", 4_330, 16, 1, "master,grad,m,v"),
    qwen("LLaMA-Factory", "0.5b", "bf16", 30_200, 16),
    qwen("LLaMA-Factory", "1.5b", "bf16", 9_400, 4),
    qwen("LLaMA-Factory", "7b", "bf16", 2_500, 16, 1, "master,grad,m,v"),
]  # fmt: skip

HEAD = """
# What runs of others reached; at_best: what `plan` says of such settings (tests/support/published_speed.py)
"""


def tables(rows: list[Speed]) -> str:
    """The [[measured]] tables of a machine's file."""
    text = HEAD
    for row in rows:
        text += f'\n[[measured]]\nrun = "{row.name}"\ndevices = {row.devices}\n'
        text += f"parameters = {row.parameters:.3g}\n"
        text += f'format = "{row.time.format}"\ntokens_per_s = {row.tokens_per_s:g}\n'
        text += f'at_best = {row.at_best:.0f}\nsource = "{row.source}"\n'
    return text


def of_machine(name: str) -> list[Speed]:
    """The runs of a machine; a node of MI250X is one of Frontier's, without the others' links."""
    if name == "mi250x":
        return [row for row in ROWS if row.cluster == "frontier" and row.devices < 512]
    return [row for row in ROWS if row.cluster == name]


def main() -> None:
    """Write the [[measured]] tables of all machines again, or of those that are named."""
    folder = Path(__file__).parents[2] / "src/narrowgauge/trainer/cluster/plan/machines"
    for file in sorted(folder.glob("*.toml")):
        if (rows := of_machine(file.stem)) and file.stem in (sys.argv[1:] or [file.stem]):
            figures = file.read_text(encoding="utf-8").partition(HEAD)[0].rstrip("\n")
            file.write_text(f"{figures}\n{tables(rows)}", encoding="utf-8")


if __name__ == "__main__":
    main()
