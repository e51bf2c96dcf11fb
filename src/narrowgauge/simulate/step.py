"""Runs a real optimizer step of a configuration on an imagined GPU, under the recorder.

Three micro-batches and the update: the second of the three is told. It begins with nothing that is made once,
and adds to gradients that exist.
"""

from typing import cast

import torch

from narrowgauge.data import Batch
from narrowgauge.devices import Device, imagine
from narrowgauge.errors import UserError
from narrowgauge.nn import Gauges
from narrowgauge.recipes import choose_backend
from narrowgauge.simulate.count import StepCount
from narrowgauge.simulate.recorder import Recorder
from narrowgauge.simulate.speeds import H200, Speeds
from narrowgauge.training import Config
from narrowgauge.training.step.trainer import Trainer

_MICRO_BATCHES = 3
_COUNTED, _LAST, _UPDATE = "micro-batch 1", "micro-batch 2", "update"


class _Phases:
    """Tells the recorder which part of the step begins; it stands where gauges would read the step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.begun = recorder, 0

    def begin_micro_batch(self, is_first: bool, is_last: bool) -> None:
        """Begin a micro-batch."""
        self.recorder.phase = f"micro-batch {self.begun}"
        self.begun += 1

    def after_backward(self) -> None:
        """Begin what follows the last backward pass."""
        self.recorder.phase = _UPDATE

    def after_step(self) -> None:
        """End the step."""
        self.recorder.phase = ""


def count_step(config: Config, facts: Device, speeds: Speeds = H200) -> StepCount:
    """Count what a step costs on a GPU, on any machine.

    Args:
        config: the model, its recipe, its micro-batch; one process.
        facts: the facts of the GPU.
        speeds: the speeds that turn work into seconds.

    Returns:
        The count. State that is kept in the host's memory is not moved in it.

    Raises:
        UserError: it is no GPU, the recipe asks for native products that
            it does not have, or the step is compiled.
    """
    if not facts.is_gpu:
        raise UserError(f"a step is counted for a GPU, not for {facts}; name one, such as h200")
    if config.training.compile:
        raise UserError(
            "a compiled step is not counted, because torch's compiler makes kernels of its own; leave "
            "training.compile out"
        )
    backend = choose_backend(config.spec.recipe, facts, config.spec.backend)
    t, length = config.training, config.data.sequence_length
    counted = config.model_copy(
        update={"training": t.model_copy(update={"batch_size": _MICRO_BATCHES * t.micro_batch_size})}
    )
    recorder, meta = Recorder(), torch.device("meta")
    with imagine(facts, recorder.told), recorder.watching():
        trainer = Trainer.begin(counted, meta)
        x_BT = torch.empty(t.micro_batch_size, length, dtype=torch.int64, device=meta)
        position_BT = x_BT if config.data.separate_documents else None
        batches = [Batch(x_BT, x_BT, x_BT.numel(), position_BT)] * _MICRO_BATCHES
        recorder.begin_peak()
        trainer.train_step(iter(batches), gauges=cast(Gauges, _Phases(recorder)))
    return StepCount(
        str(facts),
        backend.name,
        x_BT.numel(),
        t.batch_size // t.micro_batch_size,
        [e for e in recorder.events if e.phase == _COUNTED],
        [e for e in recorder.events if e.phase == _UPDATE],
        recorder.functions[_COUNTED],
        [(place, n) for (phase, place), n in recorder.waits.most_common() if phase == _COUNTED],
        sum(n for (phase, _), n in recorder.waits.items() if phase == _UPDATE),
        recorder.peak,
        recorder.held_at_peak(),
        speeds,
    )
