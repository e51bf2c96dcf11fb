"""The run: the loop, the run directory, validation, and what can be done with a finished run."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.trainer.runs.loop.loop import OutOfMemory as OutOfMemory
    from narrowgauge.trainer.runs.loop.loop import run as run
    from narrowgauge.trainer.runs.loop.resolve import Layout as Layout
    from narrowgauge.trainer.runs.loop.resolve import default_out as default_out
    from narrowgauge.trainer.runs.loop.resolve import lay_out as lay_out
    from narrowgauge.trainer.runs.loop.resolve import parallel_dims_of as parallel_dims_of
    from narrowgauge.trainer.runs.loop.validation import bits_per_byte as bits_per_byte
    from narrowgauge.trainer.runs.loop.validation import validation_loss as validation_loss
    from narrowgauge.trainer.runs.monitor.machine import choose_device as choose_device
    from narrowgauge.trainer.runs.use.branch import branch_run as branch_run
    from narrowgauge.trainer.runs.use.trained_model import TrainedRun as TrainedRun
    from narrowgauge.trainer.runs.use.trained_model import open_run as open_run
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
