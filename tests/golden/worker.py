"""A process with pinned arithmetic: reads one JSON job a line, forks its ranks, answers what they returned.

A job is `{"world": N, "products": "fp32" | "bf16" | "fp64", "calls": [...]}`; each rank makes the calls in
turn, and a call is {"run": values, "out": directory} (`ng.run`), {"argv": words} (the command line; answers
exit code and output) or {"fingerprint": true}. torch is imported once, so that a job costs little more than
its steps.

What a CPU's type would change is taken away here and by `runs.PINS`: oneDNN is off, and whether the CPU
multiplies bf16 is set by the job, not measured. Two things that hold no digit and cost more than the steps
are left out: the speed of a product (for MFU), and the estimate of memory.
"""

import contextlib
import gc
import io
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import narrowgauge as ng
import narrowgauge.trainer.laboratory.compare
import narrowgauge.trainer.laboratory.train
import narrowgauge.trainer.runs.use.export
from narrowgauge.__main__ import main as command_line
from narrowgauge.trainer.runs.loop import resolve
from narrowgauge.trainer.runs.monitor import yardstick

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden.arithmetic import fingerprint
from golden.exact import in_float64

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


def take_part(rank: int, size: int, port: int) -> None:
    """Set the variables by which a launcher identifies this process."""
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    variables = ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})


def be_rank(rank: int, job: Mapping[str, Any], ports: list[int], answer: int) -> None:
    """In a separate process: make the calls, write what they return as JSON."""
    try:
        if job["products"]:
            pin(job["products"])
        results = []
        for what, port in zip(job["calls"], ports, strict=True):
            if job["world"] > 1:
                take_part(rank, job["world"], port)
            results.append(call(what))
        result: dict[str, Any] = {"results": results}
    except BaseException:
        result = {"error": traceback.format_exc()}
    with os.fdopen(answer, "w") as pipe:
        json.dump(result, pipe)
    os._exit(0)


def free_ports(count: int) -> list[int]:
    """Ports without a listener."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


def do(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each rank answers."""
    pipes, children, ports = [], [], free_ports(len(job["calls"]))
    for rank in range(job["world"]):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            be_rank(rank, job, ports, writing)
        os.close(writing)
        pipes.append(reading)
        children.append(child)
    answers = []
    for reading, child in zip(pipes, children, strict=True):
        with os.fdopen(reading) as pipe:
            answers.append(json.loads(pipe.read() or '{"error": "died"}'))
        os.waitpid(child, 0)
    return answers


def skip(module: Any, name: str, instead: Callable[..., Any]) -> None:
    """Put something in the place of a function that must be there."""
    assert callable(getattr(module, name)), f"{module.__name__} has no {name} any more"
    setattr(module, name, instead)


def main() -> None:
    skip(yardstick, "yardstick", lambda *_: yardstick.Yardstick(1e12, "not measured"))
    skip(resolve, "require_memory", lambda *_: None)
    gc.freeze()  # a child does not look through, at its end, what it never touched
    for line in sys.stdin:
        print(json.dumps(do(json.loads(line))), flush=True)
    os._exit(0)  # no need to take torch apart


if __name__ == "__main__":
    main()
