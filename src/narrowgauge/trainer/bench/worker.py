"""Workers: each contestant of a benchmark runs in its own process, as a user's training does.

So the state of one process (cached memory, compiled code, chosen kernels) does not affect the others. The
workers of a group start first and wait. They take steps one at a time, so they never compete for the machine.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.system.processes import Worker
from narrowgauge.trainer.bench.peers import peer_step
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.runs import choose_device
from narrowgauge.trainer.runs.monitor import machine
from narrowgauge.trainer.runs.monitor.profiler import Profile, StepTime
from narrowgauge.trainer.training import Config
from narrowgauge.trainer.training.step.trainer import Trainer

OURS = "narrowgauge"
_WARM = 2  # untimed steps at the start
Ask = Callable[[str], Any]


@contextmanager
def start_workers(names: Sequence[str], config: Config) -> Iterator[dict[str, Ask]]:
    """Start a process for each name (`OURS` or a peer); they end with the `with` block.

    Each answers requests after its warm-up steps: "ready" with None; "step" with the seconds of one step;
    "profile" with the time by class of a few (`StepTime`); "memory" with the process's peak device memory in
    bytes, `allocated` and `reserved`. A request raises UserError if the process has ended.
    """
    with ExitStack() as stack:
        workers: dict[str, Ask] = {}
        for name in names:
            process = Worker(taking_steps, name, config, torch.get_num_threads())
            stack.callback(process.end)
            workers[name] = partial(_ask, name, process)
        yield workers


def _ask(name: str, process: Worker, command: str) -> Any:
    try:
        return process.ask(command)
    except Exception as error:
        raise UserError(
            f"the process of {name!r} did not measure its step: {error}; leave it out of --peers"
        ) from error


@contextmanager
def taking_steps(name: str, config: Config, threads: int) -> Iterator[Callable[[str], object]]:
    """Warm a worker process up; yields the function that answers its requests."""
    torch.set_num_threads(threads)
    device = choose_device(config.training.device)
    machine.use_device(device)
    batches = random_batches(config, device)
    if name == OURS and device.type == "cpu":
        machine.compute_by(machine.arithmetic_of(config))
    with machine.memory_kept(device) if name == OURS else ExitStack():
        step = own_step(config, device, batches) if name == OURS else peer_step(name, config, device, batches)
        for _ in range(_WARM):
            step()
        answers = {
            "ready": lambda: None,
            "step": lambda: machine.seconds(step, device),
            "memory": lambda: machine.memory_at_peak(device),
            "profile": lambda: profiled(step, device),
        }
        yield lambda command: answers[command]()


def own_step(config: Config, device: torch.device, batches: Sequence[Batch]) -> Callable[[], object]:
    """An optimizer step of this project, as in a run."""
    trainer = Trainer.begin(config, device)
    return lambda: trainer.train_step(iter(batches))


def profiled(step: Callable[[], object], device: torch.device) -> StepTime:
    """The time by class of a few steps."""
    with TemporaryDirectory() as directory:
        profile = Profile(Path(directory), 0, device)
        number, step_time = 0, None
        while step_time is None:
            number += 1
            _, step_time = profile.step(number, step, is_last=False)
    return step_time


def random_batches(config: Config, device: torch.device) -> list[Batch]:
    """The micro-batches of a step: random tokens, the same in every process."""
    t, T = config.training, config.data.sequence_length
    g = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(t.batch_size // t.micro_batch_size):
        shape = (t.micro_batch_size, T + 1)
        ids = torch.randint(config.spec.model.vocab_size, shape, generator=g).to(device)
        batches.append(Batch(ids[:, :-1], ids[:, 1:], ids[:, 1:].numel()))
    return batches
