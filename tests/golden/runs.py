"""Tiny runs, and what is kept of them: every digit of the losses, a digest of every tensor of the state."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import deserialize

import narrowgauge as ng
from narrowgauge.trainer.experiment.design import with_keys
from support.processes import RANKS, Ask, launched, server
from support.runs import WORDS, Values

HERE = Path(__file__).parent
Cell = dict[str, Any]

# What holds the arithmetic still, from before torch is imported. `COMPATIBLE` is MKL's code path that gives
# the same digits on every x86-64 CPU; with AVX2 torch brings its own transcendentals, and asks no libm.
PINS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "NARROWGAUGE_KERNELS": "0",
    "TRITON_INTERPRET": "0",
    "PYTHONHASHSEED": "0",
}

# Two blocks of 128 in `ffn_dim`, one in `dim`, two and a bit in the vocabulary. The initial weights are
# given, so that no digit follows from the rule of a named size.
TINY: Values = {
    "model": {"dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 256, "vocab_size": 257}
    | {"initial_std": 0.02},
    "data": {"tokenizer": "bytes", "sequence_length": 64},
    "training": {"steps": 8, "batch_size": 2, "micro_batch_size": 2, "device": "cpu", "hang_timeout": 60},
    "schedule": {"warmup_steps": 2},
    "validation": {"every": 100, "batches": 1},
    "checkpoint": {"every": 100},
    "gauges": {"every": 0},
    "log": {"prompt": "a"},
}


def write_text(directory: Path) -> Path:
    """Forty documents of some 300 characters, always the same."""
    directory.mkdir()
    for i in range(40):
        words = (WORDS[(i * j * j + 3 * j + i) % 8] for j in range(40 + i))
        (directory / f"{i:02}.txt").write_text(" ".join(words) + "\n")
    return directory


class Worker:
    """The pinned process, and a directory for what it makes."""

    def __init__(self, ask: Ask, directory: Path) -> None:
        self.ask, self.directory = ask, directory
        write_text(directory / "text")

    def __call__(self, *calls: Mapping[str, Any], world: int = 1, products: str = "fp32") -> list[Any]:
        """What the first rank of a world returned of each call; a failure of any rank is shown."""
        how = {"environments": launched(world) if world > 1 else [{}], "meets": False}
        what = {"products": products, "calls": calls}
        answers = self.ask({"do": "golden.worker.make", "with": what, **how})
        errors = [f"rank {i}: {a['trace']}" for i, a in enumerate(answers) if "trace" in a]
        assert not errors, "\n".join(errors)
        return list(answers[0]["result"])

    def values(self, recipe: str, changes: Mapping[str, Any] | None = None) -> Values:
        """Values of a tiny run, with `{"section.key": value}` over them."""
        # The text is below the directory of the worker, whose path thus stands nowhere.
        return with_keys(TINY, {"data.source": "text", "recipe.name": recipe, **(changes or {})})

    def train(self, name: str, values: Values, world: int = 1, products: str = "fp32") -> Path:
        """The run directory of a separate training, trained once."""
        out = self.directory / "runs" / re.sub(r"\W+", "-", name)
        if not out.exists():
            self({"run": values, "out": str(out)}, world=world, products=products)
        return out


@contextmanager
def worker(directory: Path, pins: Mapping[str, str] = PINS) -> Iterator[Worker]:
    """A process with pinned arithmetic, of the package that this process imports."""
    package = Path(ng.__file__).parents[1]
    inherited = {k: v for k, v in os.environ.items() if k not in PINS}
    own = {"NARROWGAUGE_CACHE": str(directory / "cache"), "PYTHONPATH": str(package), "COLUMNS": "110"}
    own["NARROWGAUGE_PRODUCTS"] = "onednn"  # what `pin` records, and not what a moment measures
    own["NARROWGAUGE_ATTENTION"] = "torch"
    environment = inherited | own | dict(pins)
    with server(RANKS, "golden.worker", cwd=directory, env=environment) as ask:
        yield Worker(ask, directory)


def kept_file(name: str) -> Path:
    """The golden file of a part."""
    return HERE / "kept" / f"{name}.json"


def read_kept(name: str) -> Any:
    """What a golden file holds."""
    return json.loads(kept_file(name).read_text(encoding="utf-8"))


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def sha(data: bytes, digits: int = 16) -> str:
    """The first digits of a sha256."""
    return hashlib.sha256(data).hexdigest()[:digits]


def tensors_of(file: Path) -> dict[str, tuple[str, bytes]]:
    """(dtype, bytes) of each tensor of a safetensors file."""
    return {name: (facts["dtype"], facts["data"]) for name, facts in deserialize(file.read_bytes())}


def state_of(checkpoint: Path) -> dict[str, str]:
    """The digests of all tensors of a checkpoint, a line for each parameter, whichever files hold the parts.

    A digest is over dtype, shape, and the parts in the order in which they lie in the tensor.
    """
    groups = json.loads((checkpoint / "index.json").read_text())["groups"]
    files: dict[str, dict[str, tuple[str, bytes]]] = {}
    parameters = sorted((name.rpartition(".")[0] for name in groups["model"]), key=len, reverse=True)
    found: dict[str, list[str]] = {}
    for group, tensors in groups.items():
        for name, facts in tensors.items():
            if "same_as" in facts:  # a second name of a tensor
                continue
            parts = hashlib.sha256(f"{facts['dtype']} {facts['shape']}".encode())
            for box in sorted(facts["boxes"], key=lambda box: box["offset"]):
                if box["file"] not in files:
                    files[box["file"]] = tensors_of(checkpoint / box["file"])
                parts.update(f"{box['offset']} {box['size']}".encode())
                parts.update(files[box["file"]][box["key"]][1])
            owner = next((p for p in parameters if name.startswith(f"{p}.")), "")
            own = name.removeprefix(f"{owner}.")
            what = own if group == "model" else f"{group}:{own.removeprefix('weight.')}"
            found.setdefault(owner, []).append(f"{what}={parts.hexdigest()[:8]}")
    return {owner: " ".join(sorted(digests)) for owner, digests in sorted(found.items())}


def checkpoint_of(run: Path) -> Path:
    """The last checkpoint of a run."""
    return max((run / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))


def gauges_of(run: Path) -> dict[str, str]:
    """The digest of each reading of the gauges, a line for each layer."""
    found: dict[str, list[str]] = {}
    for line in lines_of(run / "gauges.jsonl"):
        digest = sha(json.dumps(line, sort_keys=True).encode(), 8)
        found.setdefault(line["layer"], []).append(f"{line['place']}={digest}")
    return {layer: " ".join(digests) for layer, digests in found.items()}


def digits_of(run: Path) -> Cell:
    """What a finished run is compared by."""
    lines = lines_of(run / "metrics.jsonl")
    steps = [f"{line['loss'].hex()} {line['grad_norm'].hex()}" for line in lines if "loss" in line]
    digits = {
        "loss and grad_norm": steps,
        "val_loss": [line["val_loss"].hex() for line in lines if "val_loss" in line],
        "state": state_of(checkpoint_of(run)),
    }
    return digits | ({"gauges": gauges_of(run)} if (run / "gauges.jsonl").exists() else {})
