"""The settings here that are nearest to those of runs whose speed others have published; nothing is fitted.

The machines' files hold the figures (`[[measured]]`), each with the speed that `plan` calls the best:
`python -m support.published_speed`, in tests/, writes that again after a change of the estimate.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowgauge.system.devices import imagine
from narrowgauge.trainer.cluster.plan.cluster_spec import MeasuredRun, load_cluster
from narrowgauge.trainer.cluster.plan.estimate import Estimate, estimate
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.runs import parallel_dims_of
from narrowgauge.trainer.simulate import estimate_step
from narrowgauge.trainer.training import Config, make_config

_TIMES: dict[str, Estimate] = {}


@dataclass(frozen=True)
class Speed:
    """The settings of one run."""

    name: str
    cluster: str
    model: str
    recipe: str = "bf16"
    tokens: int = 8192
    micro_batch: int = 1
    batch: int = 0  # sequences of a step on one device; 0: one micro-batch
    every: int = 0  # recomputation
    offload: str = ""
    parallel: dict[str, int] = field(default_factory=dict)

    @property
    def measured(self) -> MeasuredRun:
        """What its machine's file holds of it."""
        (found,) = (run for run in load_cluster(self.cluster).measured if run.run == self.name)
        return found

    @cached_property
    def config(self) -> Config:
        """The configuration here."""
        data = self.measured.devices
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
    def parameters(self) -> int:
        """Parameters of the model."""
        return count_parameters(self.config.spec.model)

    @property
    def time(self) -> Estimate:
        """What `plan` reports for its settings; several programs can share settings."""
        devices = self.measured.devices
        settings = repr((replace(self, name=""), devices))
        if settings not in _TIMES:
            mesh, cluster = parallel_dims_of(self.config, devices), load_cluster(self.cluster)
            with imagine(cluster.facts):
                step = estimate_step(self.config, mesh)
            _TIMES[settings] = estimate(self.config, mesh, cluster, step)
        return _TIMES[settings]

    @property
    def at_best(self) -> float:
        """Tokens/s of one device, at best."""
        return self.time.tokens / self.time.seconds / self.measured.devices


def titan(name: str, cluster: str, recipe: str = "bf16", micro: int = 2) -> Speed:
    return Speed(name, cluster, "llama3-8b", recipe, micro_batch=micro, every=2)


def qwen(program: str, size: str, recipe: str, micro: int, every: int = 0, offload: str = "") -> Speed:
    name = f"{program} {size.upper()}, 1 RTX 4090, {recipe}"
    return Speed(name, "rtx4090", f"qwen2.5-{size}", recipe, 1024, micro, 512, every, offload)


def llmc(size: str, cluster: str, micro: int, batch: int) -> Speed:
    name, model = f"llm.c {size}, 8 {cluster.upper()}", f"gpt2-{size.lower()}"
    return Speed(name, cluster, model, "bf16", 1024, micro, batch, parallel={"replicate": 8})


def frontier_guide(name: str) -> Speed:
    return Speed(f"FSDP1 8B, 64 nodes of Frontier{name}", "frontier", "llama3-8b", micro_batch=4, every=1)


ROWS = [
    titan("torchtitan 8B, 8 H100, bf16", "h100"),
    titan("torchtitan 8B, 8 H100, float8", "h100", "fp8"),
    titan("torchtitan 8B, 128 H100, bf16", "h100"),
    titan("torchtitan 8B, 128 H100, float8", "h100", "fp8"),
    Speed(
        "torchtitan 70B, 256 H100, float8", "h100", "llama3-70b", "fp8", 8192, 16, 16, 1,
        parallel={"tensor": 8},
    ),
    titan("torchao 8B, 8 H100, bf16", "h100", micro=1),
    titan("torchao 8B, 8 H100, float8", "h100", "fp8", micro=1),
    titan("torchao 8B, 8 H100, float8 by row", "h100", "fp8-row", micro=1),
    llmc("124M", "h100", 64, 64),
    llmc("1558M", "h100", 16, 128),
    titan("torchtitan 8B, 32 H200, float8", "h200", "fp8"),
    titan("torchtitan 8B, 64 H200, float8", "h200", "fp8"),
    titan("torchao 8B, 8 B200, bf16", "b200", micro=1),
    titan("torchao 8B, 8 B200, float8", "b200", "fp8", micro=1),
    titan("torchao 8B, 8 B200, mxfp8", "b200", "mxfp8", micro=1),
    titan("torchao 8B, 8 MI300X, bf16", "mi300x", micro=1),
    titan("torchao 8B, 8 MI300X, float8", "mi300x", "fp8-fnuz", micro=1),
    titan("torchtitan 8B, 64 A100, bf16", "a100", micro=1),
    llmc("124M", "a100", 64, 64),
    llmc("350M", "a100", 64, 64),
    llmc("774M", "a100", 32, 64),
    Speed("TinyLlama 1.1B, 16 A100, bf16", "a100", "tinyllama-1.1b", "bf16", 2048, 8),
    titan("torchtitan 8B, 8 nodes of Frontier", "frontier", micro=1),
    *map(frontier_guide, (", 2024-09-05", ", with aws-ofi-rccl", ", ROCm 6.2")),
    qwen("llmq", "0.5b", "bf16", 16),
    qwen("llmq", "0.5b", "fp8", 16),
    qwen("llmq", "1.5b", "bf16", 4),
    qwen("llmq", "1.5b", "fp8", 4),
    qwen("llmq", "7b", "bf16", 16, 1, "master,grad,m,v"),
    qwen("llmq", "7b", "fp8", 16, 1, "master,grad,m,v"),
    qwen("LLaMA-Factory", "0.5b", "bf16", 16),
    qwen("LLaMA-Factory", "1.5b", "bf16", 4),
    qwen("LLaMA-Factory", "7b", "bf16", 16, 1, "master,grad,m,v"),
]  # fmt: skip


def main() -> None:
    """Write the best speeds of all machines' files again; MI250X's run is one of Frontier's."""
    folder = Path(__file__).parents[2] / "src/narrowgauge/trainer/cluster/plan/machines"
    best = {row.name: f"{row.at_best:.0f}" for row in ROWS}
    for file in folder.glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        for name, speed in best.items():
            text = re.sub(rf'(run = "{re.escape(name)}"[^\[]*?at_best = )[\d.]+', rf"\g<1>{speed}", text)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
