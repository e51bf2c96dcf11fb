"""A model put to use: the newest of a run, or one that another program left."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from narrowgauge.checkpoint.interop.external_model import is_external_model, read_external_model
from narrowgauge.checkpoint.interop.name_map import ExternalModel
from narrowgauge.data import Tokenizer, load_tokenizer
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer
from narrowgauge.models.sizes import name_of
from narrowgauge.nn import Linear
from narrowgauge.training.config.config import Config, make_config
from narrowgauge.training.monitor.hardware import choose_device
from narrowgauge.training.run_directory import RunDirectory
from narrowgauge.training.step.build_model import build_model, load_model, newest_checkpoint

# Of an imported model, whose text nobody knows: windows of a length that a CPU can do.
_WINDOW = 1024


@dataclass(frozen=True)
class TrainedRun:
    """What a run left: its configuration, the model of its newest checkpoint, its tokenizer."""

    path: Path
    config: Config
    model: Transformer
    step: int
    tokenizer_file: Path | None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its tokens. Raises `UserError` where there is none."""
        if self.tokenizer_file is None:
            raise UserError(
                f"{self.path} came without a tokenizer, and text needs one; name it with --tokenizer FILE"
            )
        return load_tokenizer(self.tokenizer_file)

    def weights(self) -> dict[str, torch.Tensor]:
        """Plain float32 weights under our names, whatever the recipe keeps them in."""
        names = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: t.float().cpu() for name, t in self.model.state_dict().items() if name in names}

    def prompt_ids(self, text: str) -> list[int]:
        """The ids a model continues: begun as the tokenizer itself begins a text, if it does."""
        tokenizer = self.tokenizer
        begin = tokenizer.library.encode("", add_special_tokens=True).ids
        return [*begin, *tokenizer.encode(text)] or [tokenizer.end_of_document]

    @property
    def is_tokenwise(self) -> bool:
        """Whether what a layer makes of a token depends on that token alone (`models/generate.py`)."""
        for module in self.model.modules():
            if isinstance(module, Linear):
                cast = module.casts["fprop.x"]
                own_scales = not cast.is_scaled or (cast.scale != "e4m3" and (cast.block or (0,))[0] == 1)
                if not own_scales or cast.outliers or cast.rounding == "stochastic":
                    return False
        return True


def open_run(path: Path, device: str = "auto", tokenizer: Path | None = None) -> TrainedRun:
    """Open a run directory, a folder of Hugging Face's or an llm.c model file for sampling or evaluation.

    `tokenizer` replaces the model's own.

    Raises:
        UserError: no run or model, or a run without a checkpoint.
    """
    on = choose_device(device)
    if is_external_model(path):
        there = read_external_model(path)
        model = plain_model(there).to(on)
        return TrainedRun(path, imported_config(there), model.eval(), 0, tokenizer or there.tokenizer)
    directory = RunDirectory(path)
    config = directory.config(own_recipe=True)
    checkpoint, _ = newest_checkpoint(directory.checkpoints, None)
    if checkpoint is None:
        raise UserError(
            f"{path} has no checkpoint yet: the first is saved after checkpoint.every = "
            f"{config.checkpoint.every} steps; continue the run first"
        )
    model = build_model(config, on)
    load_model(model, config, checkpoint)
    own = directory.tokenizer if directory.tokenizer.is_file() else None
    return TrainedRun(path, config, model.eval(), checkpoint.step, tokenizer or own)


def plain_model(there: ExternalModel) -> Transformer:
    """A model whose parameters are the tensors themselves."""
    with torch.device("meta"):
        model = Transformer(there.config)
    model.load_state_dict(dict(there.tensors), assign=True)
    model.tie_head()
    return model


def imported_config(there: ExternalModel, source: str = "stdlib") -> Config:
    """The configuration of a run that begins, and for now ends, with a foreign model."""
    values = {name: value for name, value in vars(there.config).items() if value is not None}
    length = min(_WINDOW, there.config.max_sequence_length)
    return make_config(
        {
            "model": {"name": name_of(there.config), **values},
            "data": {"source": source, "tokenizer": "tokenizer.json", "sequence_length": length},
            "training": {"batch_size": 1, "micro_batch_size": 1},
            "recipe": {"name": "fp32"},
        }
    )
