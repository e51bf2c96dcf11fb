"""Whoever takes part in a comparison has a process of its own, as a user's would be.

What one does to its process (how memory is kept, what is compiled, which kernels were chosen) is then no gift
to the others and no burden. They are all made first and wait; one at a time takes a step, so that they never
compete for the machine.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from narrowgauge.bench.peers import peer_step
from narrowgauge.bench.timing import seconds
from narrowgauge.data import Batch
from narrowgauge.errors import UserError
from narrowgauge.training import Config, choose_device
from narrowgauge.training.monitor.hardware import memory_kept
from narrowgauge.training.monitor.profiler import Profile, StepTime
from narrowgauge.training.step.trainer import Trainer

OURS = "narrowgauge"
_WARM = 2  # steps before any is timed


class Worker:
    """A process that takes steps when it is asked to."""

    def __init__(self, name: str, answers: Connection) -> None:
        """The parent's end."""
        self.name, self._answers = name, answers

    def step(self) -> float:
        """The seconds of one step."""
        found = self._ask("step")
        assert isinstance(found, float)
        return found

    def profile(self) -> StepTime:
        """The time by class of a few steps."""
        found = self._ask("profile")
        assert isinstance(found, StepTime)
        return found

    def is_ready(self) -> None:
        """Wait until its first steps are done."""
        self._ask("ready")

    def _ask(self, what: str) -> object:
        try:
            self._answers.send(what)
            return self._answers.recv()
        except (EOFError, OSError):
            raise UserError(
                f"the process of {self.name!r} ended before its step was measured; its own words are above, "
                "and --peers leaves it out"
            ) from None


@contextmanager
def start_workers(names: Sequence[str], config: Config) -> Iterator[list[Worker]]:
    """Processes for `OURS` and for peers, for the length of a `with`."""
    context = get_context("spawn")
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        found = []
        for name in names:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(name, config, threads, there))
            process.start()
            there.close()
            stack.callback(process.join, 10)
            stack.callback(process.terminate)
            stack.callback(here.close)
            found.append(Worker(name, here))
        yield found


def serve(name: str, config: Config, threads: int, asked: Connection) -> None:
    """The life of a contender."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and nobody asks any more
    torch.set_num_threads(threads)
    device = choose_device(config.training.device)
    batches = random_batches(config, device)
    with memory_kept(device) if name == OURS else ExitStack():
        step = own_step(config, device, batches) if name == OURS else peer_step(name, config, device, batches)
        for _ in range(_WARM):
            step()
        while True:
            try:
                what = asked.recv()
                asked.send(_answer(what, step, device))
            except (EOFError, OSError):  # nobody asks any more
                return


def _answer(what: str, step: Callable[[], object], device: torch.device) -> object:
    if what == "step":
        return seconds(step, device)
    return profiled(step, device) if what == "profile" else None


def own_step(config: Config, device: torch.device, batches: Sequence[Batch]) -> Callable[[], object]:
    """A step as a run takes it."""
    trainer = Trainer.begin(config, device)
    return lambda: trainer.train_step(iter(batches))


def profiled(step: Callable[[], object], device: torch.device) -> StepTime:
    """The time by class of some steps."""
    with TemporaryDirectory() as directory:
        profile = Profile(Path(directory), 0, device)
        number, found = 0, None
        while found is None:
            number += 1
            _, found = profile.step(number, step, is_last=False)
    return found


def random_batches(config: Config, device: torch.device) -> list[Batch]:
    """The micro-batches of a step, always the same."""
    t, T = config.training, config.data.sequence_length
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(t.batch_size // t.micro_batch_size):
        shape = (t.micro_batch_size, T + 1)
        ids = torch.randint(config.resolved_model().vocab_size, shape, generator=g).to(device)
        found.append(Batch(ids[:, :-1], ids[:, 1:], ids[:, 1:].numel()))
    return found
