"""Queries torch in a separate process.

A torch that does not fit the machine may do worse than raise: it may crash the process that imports it, or
hang on a broken driver. So the doctor never imports it. Its use of a GPU has also ended by the time the
doctor looks for other users of the GPUs.
"""

import json
import sys
from signal import Signals
from typing import Any

from narrowgauge.system.processes import Output, output_of
from narrowgauge.trainer.cluster.doctor.facts import release
from narrowgauge.trainer.cluster.doctor.torch_setup.import_errors import UNKNOWN, words_of_import

_SECONDS = 120.0
_ASK = "from narrowgauge.trainer.cluster.doctor.torch_setup.ask_torch import answer; answer()"
_MARK = "narrowgauge-doctor:"


def ask_torch() -> dict[str, Any]:
    """What torch reports about itself and the GPUs it sees, as `Facts`, if only `torch_error`.

    A process imports it; a CPU build that is already imported is queried directly. `gpus` are the fields of
    `Gpu` for each, and its `uuid`.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not (torch.version.cuda or torch.version.hip):
        return _software(torch)
    return parse_report(output_of([sys.executable, "-c", _ASK], _SECONDS))


def parse_report(output: Output) -> dict[str, Any]:
    """The report in the line that `answer` prints, or why that line is missing."""
    lines = [line for line in output.out.splitlines() if line.startswith(_MARK)]
    report = json.loads(lines[-1].removeprefix(_MARK)) if lines else {"torch_error": _end_of(output)}
    if not report.pop("asked", True):
        report["gpu_error"] = _end_of(output)
    return {name: tuple(x) if isinstance(x, list) else x for name, x in report.items()}


def _end_of(output: Output) -> str:
    """How a process ended that printed no report."""
    if output.code is not None and output.code < 0:
        return f"its process was killed by {Signals(-output.code).name}"
    lines = output.error.strip().splitlines()
    return lines[-1][:300] if lines else "its process ended without an answer"


def answer() -> None:
    """Print torch's facts, then the GPUs it sees; lines already printed survive a crash."""
    try:
        import torch  # here: the doctor imports this file, and never torch
    except Exception as error:  # anything that a broken installation raises is a result
        print(_MARK + json.dumps({"torch_error": words_of_import(error)}))
        return
    try:
        report = _software(torch)
    except Exception as error:
        print(_MARK + json.dumps({"torch_error": f"{UNKNOWN}: {words_of_import(error)}"}))
        return
    print(_MARK + json.dumps(report | {"asked": False}), flush=True)
    try:
        if report["build"] != "cpu":
            torch.cuda.init()
            report["gpus"] = [_gpu(torch, index) for index in range(torch.cuda.device_count())]
    except Exception as error:
        report["gpu_error"] = words_of_import(error)
    print(_MARK + json.dumps(report), flush=True)


def _software(torch: Any) -> dict[str, Any]:
    """Torch's part of `Facts`, without GPUs; raises if torch lacks a name that this package needs."""
    from narrowgauge.system.torch_compat import cuda_architectures

    backends: list[str] = []
    distributed, is_gpu = torch.distributed, torch.version.cuda or torch.version.hip
    if distributed.is_available():
        known = {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}
        backends = [name for name, is_there in known.items() if is_there()]
    return {
        **build_of(str(torch.__version__), torch.version.cuda or "", torch.version.hip or ""),
        "architectures": tuple(cuda_architectures()),
        "backends": tuple(backends),
        "nccl": torch.cuda.nccl.version()[:3] if is_gpu and "nccl" in backends else (),
    }


def build_of(version: str, cuda: str, hip: str) -> dict[str, Any]:
    """A build of torch as `Facts`, from its version and those of CUDA and ROCm."""
    build = "rocm" if hip else "cuda" if cuda else "cpu" if version else ""
    return {"torch": version, "build": build, "library": release(hip or cuda or "0.0")}


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    """The fields of `Gpu` and the `uuid` of one GPU."""
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    is_amd = bool(torch.version.hip)
    return {
        "name": properties.name,
        "maker": "amd" if is_amd else "nvidia",
        "capability": (0, 0) if is_amd else torch.cuda.get_device_capability(index),
        "architecture": properties.gcnArchName.partition(":")[0] if is_amd else "",
        "memory": properties.total_memory,
        "peers": [other for other in others if torch.cuda.can_device_access_peer(index, other)],
        "uuid": str(getattr(properties, "uuid", "")),
        "used": total - free,
    }
