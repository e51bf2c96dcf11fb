"""Opens a model for use: the newest of a run, or a model of another program; and the text of the run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from narrowgauge.nn import Linear, NarrowAttention, NarrowResidual
from narrowgauge.quantization import Cast
from narrowgauge.quantization import cast as named_cast
from narrowgauge.quantization.keys import Consumer
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import load, newest_valid
from narrowgauge.trainer.checkpoint.interop.external_model import is_external_model, read_external_model
from narrowgauge.trainer.checkpoint.interop.name_map import ExternalModel
from narrowgauge.trainer.data import (
    AUTO,
    Batch,
    Dataset,
    Mixture,
    Progress,
    Tokenizer,
    load_tokenizer,
    open_data,
    split_sources,
    validation_batches,
)
from narrowgauge.trainer.data.token_files.source import token_files
from narrowgauge.trainer.models import Transformer
from narrowgauge.trainer.models.sizes import name_of
from narrowgauge.trainer.runs.monitor.machine import arithmetic_of, choose_device, compute_by, use_device
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.training.config.config import Config, held_out_sequences, make_config
from narrowgauge.trainer.training.step.build_model import go_to, model_of

# Sequence length for an imported model, whose training length is unknown; short enough for a CPU.
_WINDOW = 1024


@dataclass(frozen=True)
class TrainedRun:
    """A trained run: its configuration, the model of its newest checkpoint, its tokenizer.

    `special_tokens` come from an imported model's files (`huggingface.special_tokens_of`).
    """

    path: Path
    config: Config
    model: Transformer
    step: int
    tokenizer_file: Path | None
    special_tokens: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run.

        Raises:
            UserError: the run has none.
        """
        if self.tokenizer_file is None:
            raise UserError(
                f"{self.path} came without a tokenizer, and text needs one; name it with --tokenizer FILE"
            )
        return load_tokenizer(self.tokenizer_file)

    def go_to_sample(self, first: int) -> None:
        """Set the position in the step of the first sequence of the next forward pass."""
        go_to(self.model, self.config, self.step, first)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by parameter name as float32 on the CPU, in whatever format the recipe keeps them."""
        names = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: t.float().cpu() for name, t in self.model.state_dict().items() if name in names}

    def prompt_ids(self, text: str) -> list[int]:
        """The token ids of a prompt, with the begin tokens that the tokenizer adds to a text."""
        tokenizer = self.tokenizer
        begin = tokenizer.library.encode("", add_special_tokens=True).ids
        return [*begin, *tokenizer.encode(text)] or [tokenizer.end_of_document]

    @property
    def is_tokenwise(self) -> bool:
        """Whether every layer treats each token independently of the others (`models/generate.py`)."""
        modules = list(self.model.modules())
        if any(isinstance(m, NarrowAttention) and not m.is_wide for m in modules):
            return False  # scales of keys, values and probabilities are of several tokens
        casts = [m.spec.casts["fprop.x"] for m in modules if isinstance(m, Linear)]
        casts += [m.cast for m in modules if isinstance(m, NarrowResidual)]
        return all(map(is_tokenwise, casts))


def is_tokenwise(cast: Cast) -> bool:
    """Whether a token's values in a cast, along the width of the model, depend on that token alone."""
    parts = [cast, *([named_cast(cast.keep_cast)] if cast.keep_cast else [])]
    scales_per_token = all(
        not c.is_scaled or (c.tensor_scale != "tensor" and (c.block or (0,))[0] == 1) for c in parts
    )
    return scales_per_token and not cast.unsupported[Consumer.TOKENWISE] and not cast.is_random


def open_run(path: Path, device: str = "auto", tokenizer: Path | None = None) -> TrainedRun:
    """Open a run directory, a Hugging Face folder or an llm.c model file for sampling or evaluation.

    Args:
        path: the run or model.
        device: "auto", "cpu", "cuda" or "cuda:N".
        tokenizer: a tokenizer file that replaces the model's.

    Raises:
        UserError: the path is neither a run nor a model, or the run has no checkpoint.
    """
    target = choose_device(device)
    use_device(target)
    if is_external_model(path):
        external = read_external_model(path)
        model = plain_model(external).to(target)
        files = (tokenizer or external.tokenizer, external.special_tokens)
        return TrainedRun(path, imported_config(external), model.eval(), 0, *files)
    directory = RunDirectory(path)
    config = directory.config(own_recipe=True)
    newest, _ = newest_valid(directory.checkpoints, None)
    if newest is None:
        raise UserError(
            f"{path} has no checkpoint yet: the first is saved after checkpoint.every = "
            f"{config.checkpoint.every} steps; continue the run first"
        )
    if target.type == "cpu" and (lines := directory.lines()):
        compute_by(arithmetic_of(config, lines))
    in_force, model = model_of(config, checkpoint := load(newest), target)
    saved = directory.tokenizer if directory.tokenizer.is_file() else None
    return TrainedRun(path, in_force, model, checkpoint.step, tokenizer or saved, directory.special_tokens())


def plain_model(external: ExternalModel) -> Transformer:
    """A model whose parameters are the external tensors, without a copy."""
    with torch.device("meta"):
        model = Transformer(external.config)
    model.load_state_dict(dict(external.tensors), assign=True)
    model.tie_head()
    return model


def imported_config(external: ExternalModel, source: str = "stdlib") -> Config:
    """The configuration of a run directory for an imported model."""
    values = {name: value for name, value in vars(external.config).items() if value is not None}
    length = min(_WINDOW, external.config.max_sequence_length)
    return make_config(
        {
            "model": {"name": name_of(external.config), **values},
            "data": {"source": source, "tokenizer": "tokenizer.json", "sequence_length": length},
            "training": {"batch_size": 1, "micro_batch_size": 1},
            "recipe": {"name": "fp32"},
        }
    )


def held_out_batches(
    config: Config, tokens: Mixture, length: int = 0, batches: int | None = None
) -> Iterator[Batch]:
    """Held-out sequences of `length` tokens (0: the run's), as many as in `batches` of it; None for all."""
    data, size = config.data, config.training.micro_batch_size
    length = length or data.sequence_length
    sequences = None if batches is None else held_out_sequences(config.training, batches)
    return validation_batches(tokens, size, length, sequences, data.separate_documents)


def run_data(trained: TrainedRun, source: str | None, progress: Progress | None = None) -> Dataset:
    """The run's own data, or another source: text encoded with the run's tokenizer, or token files."""
    data = trained.config.data
    is_made = data.tokenizer in (AUTO, "bytes") or data.tokenizer.startswith(("bpe-", "ids-"))
    use_run_tokenizer = source is not None or not (is_made or Path(data.tokenizer).exists())
    text, weights = source or data.source, data.weights if source is None else ()
    if not use_run_tokenizer:
        name = data.tokenizer
    elif trained.tokenizer_file is None and all(map(token_files, split_sources(text, weights))):
        name = f"ids-{trained.model.config.vocab_size}"  # tokens need no tokenizer, only ids of the model
    else:
        assert trained.tokenizer  # raises where there is none
        name = str(trained.tokenizer_file)
    return open_data(text, name, weights, progress)
