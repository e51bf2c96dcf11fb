"""The loss on held-out text: always the same batches, so that two numbers compare.

A loss in nats per token compares two models only if they have one tokenizer. Bits per byte compares any
two:

    bits per byte = sum of -log2 p(token) over the tokens / bytes of UTF-8 text that these tokens stand for

The end of a document is a token to be predicted like any other, and stands for no bytes.
"""

import json
import math

import torch

from narrowgauge.data import Tokenizer, Tokens, validation_batches
from narrowgauge.models import Transformer


@torch.no_grad()
def validation_loss(
    model: Transformer, tokens: Tokens, batch_size: int, sequence_length: int, batches: int | None
) -> float:
    """Mean cross entropy in nats per token over `batches` batches spread over the tokens; None = all."""
    device = next(model.parameters()).device
    total = count = 0.0
    for x_BT, y_BT in validation_batches(tokens, batch_size, sequence_length, batches):
        total += model.loss(x_BT.to(device), y_BT.to(device)).item() * y_BT.numel()
        count += y_BT.numel()
    return total / count


def bits_per_byte(
    loss: float,
    tokenizer: Tokenizer,
    tokens: Tokens,
    batch_size: int,
    sequence_length: int,
    batches: int | None,
) -> float:
    """What `validation_loss` of the same batches is in bits per byte of text; NaN where there is no text."""
    lengths = token_bytes(tokenizer)
    count = text = 0
    for _, y_BT in validation_batches(tokens, batch_size, sequence_length, batches):
        text += int(lengths[y_BT.long()].sum())
        count += y_BT.numel()
    return loss * count / (math.log(2) * text) if text else math.nan


def token_bytes(tokenizer: Tokenizer) -> torch.Tensor:
    """Bytes of UTF-8 that each id stands for, int64; 0 for special tokens.

    In a byte-level vocabulary each character of an entry is one byte. In others an entry is text, with a
    mark (U+2581) for a space and `<0xNN>` for a single byte.
    """
    settings = json.loads(tokenizer.library.to_str())
    special = {entry["id"] for entry in settings["added_tokens"] if entry["special"]}
    is_byte_level = "ByteLevel" in json.dumps(settings["decoder"])
    lengths = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
    for entry, i in tokenizer.library.get_vocab(with_added_tokens=True).items():
        if i in special or i == tokenizer.end_of_document:
            continue
        if is_byte_level:
            lengths[i] = len(entry)
        elif len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">"):
            lengths[i] = 1
        else:
            lengths[i] = len(entry.replace("\u2581", " ").encode("utf-8"))
    return lengths
