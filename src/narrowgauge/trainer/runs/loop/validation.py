"""The loss on held-out text, always on the same batches, so that two values can be compared.

A loss in nats per token compares two models only if they share a tokenizer. Bits per byte compares any two:

    bits per byte = sum of -log2 p(token) over the tokens / bytes of UTF-8 text that these tokens encode

The end of a document is predicted like any other token, and counts as 0 bytes.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.trainer.data import Mixture, Tokenizer, Tokens, validation_batches
from narrowgauge.trainer.distributed import Engine
from narrowgauge.trainer.models import IGNORED

PARTS = 32  # of the held-out tokens; how far a gap differs between them is its sampling error


@dataclass(frozen=True, slots=True)
class ValidationLoss:
    """Cross entropy in nats per token on held-out tokens.

    Attributes:
        losses: The mean loss of each batch, in the order of the text.
        targets: The number of predicted tokens of each batch.
    """

    losses: Sequence[float]
    targets: Sequence[int]

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
    engine: Engine,
    go_to_sample: Callable[[int], None],
    tokens: Mixture | Tokens,
    batch_size: int,
    sequence_length: int,
    batches: int | None,
    separate_documents: bool = False,
    sequences: int | None = None,
) -> ValidationLoss:
    """The loss on held-out tokens.

    `go_to_sample` informs the model of the first sequence of a batch, since a forward pass with stochastic
    rounding uses different bits for each sequence (`Trainer.go_to_sample`).

    Data-parallel ranks take turns; a rank without a batch in the last round computes the last batch again,
    because the forward pass is collective. The `batches` (None for all), or `sequences`, are spread evenly
    over the tokens.
    """
    index, count = engine.mesh.data_index, engine.mesh.parallel_dims.data
    targets, losses = [], []
    held_out = validation_batches(tokens, batch_size, sequence_length, batches, separate_documents, sequences)
    for i, batch in enumerate(held_out):
        targets.append(batch.targets)
        losses.append(0.0)
        if i % count == index:
            go_to_sample(i * batch_size)
            losses[i] = engine.evaluate(batch).item()
    if 0 < len(losses) % count <= index:
        engine.evaluate(batch)
    return ValidationLoss(engine.sum_over_ranks(losses), targets)


def bits_per_byte(
    loss: float,
    tokenizer: Tokenizer,
    tokens: Mixture | Tokens,
    batch_size: int,
    sequence_length: int,
    sequences: int | None,
    separate_documents: bool = False,
) -> float:
    """Convert the `validation_loss` of the same sequences to bits per byte of text; NaN without text."""
    lengths = token_bytes(tokenizer)
    count = text = 0
    held_out = validation_batches(tokens, batch_size, sequence_length, None, separate_documents, sequences)
    for batch in held_out:
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
