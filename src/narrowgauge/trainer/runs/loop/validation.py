"""The loss on held-out text, always on the same batches, so that two values can be compared.

A loss in nats per token compares two models only if they share a tokenizer. Bits per byte compares any two:

    bits per byte = sum of -log2 p(token) over the tokens / bytes of UTF-8 text that these tokens encode

The end of a document is predicted like any other token, and counts as 0 bytes.

One set of weights can have two losses: with the run's forward pass, and with that of another recipe. A
low-precision forward pass can raise a loss in two ways: it adds noise to the measured loss, and it led the
training to worse weights. The second loss, usually in bf16, shows the effect of the weights alone. Both are
means over the same held-out batches, so their difference is paired.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge.system.files import write_whole
from narrowgauge.system.json_lines import strict_json
from narrowgauge.trainer.data import Batch, Mixture, Tokenizer
from narrowgauge.trainer.distributed import Engine
from narrowgauge.trainer.models import IGNORED
from narrowgauge.trainer.runs.run_directory import EVALUATION
from narrowgauge.trainer.runs.use.branch import with_recipe
from narrowgauge.trainer.runs.use.trained_model import TrainedRun, held_out_batches
from narrowgauge.trainer.training.step.build_model import build_model

PARTS = 32  # of the held-out tokens; how far a gap differs between them is its sampling error


@dataclass(frozen=True, slots=True)
class ValidationLoss:
    """Cross entropy in nats per token on held-out tokens."""

    losses: Sequence[float]  # the mean loss of each batch, in the order of the text
    targets: Sequence[int]  # the number of predicted tokens of each batch

    @property
    def mean(self) -> float:
        """Over all tokens."""
        total = 0.0
        for loss, n in zip(self.losses, self.targets, strict=True):
            total += loss * n
        return total / sum(self.targets)

    @property
    def parts(self) -> list[float]:
        """The mean loss of up to `PARTS` parts: part i consists of the batches i, i + PARTS, and so on."""
        parts = [slice(i, None, PARTS) for i in range(min(PARTS, len(self.losses)))]
        return [ValidationLoss(self.losses[part], self.targets[part]).mean for part in parts]

    def record(self) -> dict[str, Any]:
        """The keys of a line of metrics.jsonl."""
        parts = [round(loss, 6) for loss in self.parts]
        return {"val_loss": self.mean, "val_tokens": sum(self.targets), "val_parts": parts}


def validation_loss(
    engine: Engine, go_to_sample: Callable[[int], None], batches: Iterable[Batch]
) -> ValidationLoss:
    """The loss on held-out batches (`validation_batches`).

    `go_to_sample` informs the model of the first sequence of a batch, since a forward pass with stochastic
    rounding uses different bits for each sequence (`Trainer.go_to_sample`).

    Data-parallel ranks take turns; a rank without a batch in the last round computes the last batch again,
    because the forward pass is collective.
    """
    index, count = engine.mesh.data_index, engine.mesh.parallel_dims.data
    targets, losses, first = [], [], 0
    for i, batch in enumerate(batches):
        targets.append(batch.targets)
        losses.append(0.0)
        if i % count == index:
            go_to_sample(first)
            losses[i] = engine.evaluate(batch).item()
        first += len(batch.x_BT)
    if 0 < len(losses) % count <= index:
        engine.evaluate(batch)
    return ValidationLoss(engine.sum_over_ranks(losses), targets)


def bits_per_byte(loss: float, tokenizer: Tokenizer, batches: Iterable[Batch]) -> float:
    """Convert the `validation_loss` of these batches to bits per byte of text; NaN without text."""
    lengths = token_bytes(tokenizer)
    count = text = 0
    for batch in batches:
        y_N = batch.y_BT[batch.y_BT != IGNORED].long()
        text += int(lengths[y_N].sum())
        count += y_N.numel()
    return loss * count / (math.log(2) * text) if text else math.nan


def token_bytes(tokenizer: Tokenizer) -> torch.Tensor:
    """UTF-8 bytes of each token id, (vocab_size,) int64; 0 for special tokens, and for ids without text.

    In a byte-level vocabulary each character of an entry is one byte. In others an entry is text, with U+2581
    for a space and `<0xNN>` for a single byte.
    """
    settings = json.loads(tokenizer.library.to_str())
    special = {entry["id"] for entry in settings["added_tokens"] if entry["special"]}
    is_byte_level = "ByteLevel" in json.dumps(settings["decoder"])
    lengths = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
    for entry, i in tokenizer.library.get_vocab(with_added_tokens=True).items():
        if i in special or i == tokenizer.end_of_document or (entry == str(i) and not is_byte_level):
            continue
        if is_byte_level:
            lengths[i] = len(entry)
        elif len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">"):
            lengths[i] = 1
        else:
            lengths[i] = len(entry.replace("\u2581", " ").encode("utf-8"))
    return lengths


def held_out_loss(trained: TrainedRun, tokens: Mixture, length: int, batches: int | None) -> float:
    """The mean loss of a run in nats per token, as `two_losses`."""
    held_out = held_out_batches(trained.config, tokens, length, batches)
    return validation_loss(Engine.of_one_process(trained.model), trained.go_to_sample, held_out).mean


@torch.no_grad()
def two_losses(
    trained: TrainedRun, recipe: str, tokens: Mixture, length: int, batches: int | None
) -> dict[str, float]:
    """The losses in nats per token: `own`, and one with the forward pass of another recipe, under its name.

    The held-out tokens are taken in sequences of `length` tokens, as many as in `batches` of the run's. The
    other recipe computes with a copy of the model, whose weights are read as float32.
    """
    own = held_out_loss(trained, tokens, length, batches)
    if trained.config.recipe.name == recipe and not trained.config.recipe.places:
        return {"own": own, recipe: own}
    config, weights = with_recipe(trained.config, recipe), trained.weights()
    model = build_model(config.spec, next(trained.model.parameters()).device)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.copy_(weights[name])
    other = replace(trained, config=config, model=model.eval())
    return {"own": own, recipe: held_out_loss(other, tokens, length, batches)}


def keep_losses(run: Path, step: int, losses: Mapping[str, float], asked: Mapping[str, Any]) -> None:
    """Write RUN/evaluation.json with the request and the losses, unless the model is another program's.

    A loss that is not finite is null there.
    """
    if (run / "config.toml").is_file():
        write_whole(run / EVALUATION, json.dumps(strict_json({"step": step, **losses, **asked})) + "\n")
