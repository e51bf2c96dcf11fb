"""Whether a run repeats recorded micro-batches (`training.graph`).

true    always, or the run is refused with the reason (`graph_gap`)
false   never
auto    where `make gpu` has found that recorded steps have the digits of usual ones: on this machine
        and device, with these versions of torch, CUDA, cuDNN and Triton, and with these sources of this
        program, whatever its version. It notes that in the cache (`files.cache_entry`). Nowhere
        else, silently
"""

import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_entry, package_digest, write_cached
from narrowgauge.system.operating_system import triton_version
from narrowgauge.trainer.distributed import Engine
from narrowgauge.trainer.distributed.parallel.micro_batch_graph import CudaGraphs, graph_gap
from narrowgauge.trainer.training.config.config import Config


def require_gpu_for_graph(config: Config, device: torch.device) -> None:
    """Refuse `training.graph = true` where there is no GPU.

    Raises:
        UserError: The device has no graphs.
    """
    if config.training.graph is True and device.type == "cpu":
        raise UserError(
            "training.graph = true, but graphs are recorded on a GPU, and this run is on a CPU; leave it out "
            "to have them wherever they are known to be right"
        )


def graphs_for(config: Config, engine: Engine) -> CudaGraphs | None:
    """What records the micro-batches of a run; None if they are launched as usual.

    Raises:
        UserError: `training.graph` is true, and a graph cannot hold them.
    """
    require_gpu_for_graph(config, engine.device)
    if config.training.graph is False or engine.device.type != "cuda":
        return None
    gap = graph_gap(engine.model, engine.mesh.is_alone, config.training.compile)
    if gap and config.training.graph is True:
        raise UserError(
            f"training.graph = true, but a graph cannot hold this run's micro-batches: {gap}; set "
            "--training.graph auto or false"
        )
    if gap or (config.training.graph == "auto" and not is_verified(engine.device)):
        return None
    return CudaGraphs(engine.device)


def is_verified(device: torch.device) -> bool:
    """Whether `make gpu` has seen equal digits on this machine with these versions."""
    return _entry(device).is_file()


def note_verified(device: torch.device, are_equal: bool) -> None:
    """Note for later runs whether the digits were equal; a cache that cannot be written changes nothing."""
    if are_equal:
        write_cached(_entry(device), _facts(device))
        return
    with suppress(OSError):
        _entry(device).unlink(missing_ok=True)


def _entry(device: torch.device) -> Path:
    return cache_entry("graphs", *_facts(device).items())


def _facts(device: torch.device) -> Mapping[str, str]:
    """What the digits of recorded and of usual launches may depend on."""
    is_gpu = device.type == "cuda"
    return {
        "machine": platform.node(),
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
        "torch": torch.__version__,
        "library": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(torch.backends.cudnn.version()) if is_gpu else "",
        "triton": triton_version(),
        "narrowgauge": package_digest(),
    }
