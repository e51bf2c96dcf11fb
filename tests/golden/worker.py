"""What the ranks of a golden run do, in processes with pinned arithmetic (`support.rank_server`).

A call is {"run": values, "out": directory} (`ng.run`), {"argv": words} (the command line; answers exit code
and output) or {"fingerprint": true}.

What a CPU's type would change is taken away here and by `runs.PINS`: oneDNN is off, and whether the CPU
multiplies bf16 is set by the job, not measured. Two things that hold no digit and cost more than the steps
are left out: the speed of a product (for MFU), and the estimate of memory.
"""

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

import narrowgauge as ng
import narrowgauge.trainer.laboratory.compare
import narrowgauge.trainer.laboratory.train
import narrowgauge.trainer.runs.use.export
from golden.arithmetic import fingerprint
from golden.exact import in_float64
from narrowgauge.__main__ import main as command_line
from narrowgauge.trainer.runs.loop import resolve
from narrowgauge.trainer.runs.monitor import machine

TO_THE_END = contextlib.ExitStack()


def pin(products: str) -> None:
    """Hold still what no variable does; `products` is the format in which bf16 operands are multiplied.

    "fp64" is more: the arithmetic that is the same on every CPU, to the end of the process.
    """
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: products == "bf16"
    if products == "fp64":
        TO_THE_END.enter_context(in_float64())


def call(what: Mapping[str, Any]) -> Any:
    """Make one call of a job."""
    if "fingerprint" in what:
        return fingerprint()
    if "run" in what:
        return str(ng.run(what["run"], what["out"], Console(file=io.StringIO())))
    sys.argv = ["narrowgauge", *what["argv"]]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = command_line()
        except SystemExit as end:
            code = int(end.code or 0)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def make(products: str, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Make the calls in turn, on this rank."""
    if products:
        pin(products)
    return [call(what) for what in calls]


patch.object(machine, "yardstick", lambda *_: machine.Yardstick(1e12, "not measured")).start()
patch.object(resolve, "require_memory", lambda *_: None).start()
