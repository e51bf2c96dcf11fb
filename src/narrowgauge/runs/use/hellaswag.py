"""HellaSwag and tasks of the same form: choose the likeliest continuation of a context.

    acc         the share of examples whose right ending has the highest log probability
    acc_norm    the same by log probability per token, as llm.c reports it

(Task: Zellers et al., arXiv 1905.07830.) Two file types, recognized by their first bytes:

llm.c's evaluation (karpathy/llm.c, `dev/data/data_common.py`), little-endian, tokens of GPT-2:

    256 x int32    [0] 20240522   [1] 1   [2] number of examples   [3] longest example in bytes
    per example    uint16: 65535, bytes of the example, index, label, number of endings E,
                   length and tokens of the context, then E times length and tokens of an ending

JSON lines (rowanz/hellaswag): {"ctx": text, "endings": [text, ...], "label": 0, ...}. Context and ending are
joined by a space and encoded as one text; the ending's tokens are those beyond the number of tokens of the
context alone; spaces at the end of a context belong to the ending (lm-evaluation-harness).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowgauge.data.signatures import LlmcMagic
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer
from narrowgauge.runs.use.trained_model import TrainedRun

_START = 65535
_GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Example:
    """Token ids of a context and of its endings; `label` is the index of the right one."""

    context: Sequence[int]
    endings: Sequence[Sequence[int]]
    label: int


@dataclass(frozen=True)
class Score:
    """The shares of right answers among `examples`."""

    examples: int
    acc: float
    acc_norm: float


def read_examples(path: Path, run: TrainedRun) -> Iterator[Example]:
    """Read the examples of a file as token ids of a model.

    Raises:
        UserError: the file is unreadable, damaged or of another type.
    """
    try:
        with path.open("rb") as file:
            is_binary = file.read(4) == LlmcMagic.EVALUATION.to_bytes(4, "little")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name the task's file") from None
    return _read_binary(path, run) if is_binary else _read_lines(path, run)


def evaluate(run: TrainedRun, path: Path, limit: int | None = None) -> Score:
    """Score a model on the first `limit` examples of a file; None for all.

    Raises:
        UserError: the file is invalid or empty.
    """
    right = right_norm = count = 0
    for example in read_examples(path, run):
        if count == limit:
            break
        total, lengths = _log_probabilities(run.model, example)
        right += int(total.argmax()) == example.label
        right_norm += int((total / lengths).argmax()) == example.label
        count += 1
    if not count:
        raise UserError(f"{path} holds no example; name the task's file")
    return Score(count, right / count, right_norm / count)


@torch.no_grad()
def _log_probabilities(model: Transformer, example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """(log probability, number of tokens) of each ending after the context, in one batch."""
    device = model.embedding.weight.device
    longest = max(map(len, example.endings))
    # A context that is too long loses its beginning, but keeps at least one token to predict from.
    context = list(example.context)[-max(1, model.config.max_sequence_length + 1 - longest) :]
    rows = [[*context, *ending, *[0] * (longest - len(ending))] for ending in example.endings]
    ids_EL = torch.tensor(rows, device=device)
    logits_ELV = model.head(model.hidden(ids_EL[:, :-1])[:, len(context) - 1 :])
    log_p_ELV = logits_ELV.float().log_softmax(dim=-1)
    log_p_EL = log_p_ELV.gather(2, ids_EL[:, len(context) :, None])[..., 0].cpu()
    lengths_E = torch.tensor([len(ending) for ending in example.endings])
    is_ending_EL = torch.arange(longest)[None] < lengths_E[:, None]
    return torch.where(is_ending_EL, log_p_EL, 0.0).sum(1), lengths_E


def _read_binary(path: Path, run: TrainedRun) -> Iterator[Example]:
    if run.tokenizer_file is not None and run.tokenizer.vocab_size != _GPT2_VOCABULARY:
        raise UserError(
            f"{path} holds tokens of GPT-2's tokenizer, and that of {run.path} has "
            f"{run.tokenizer.vocab_size} ids; name the task's JSON lines"
        )
    data = path.read_bytes()
    header, stream = np.frombuffer(data[:1024], "<i4"), np.frombuffer(data[1024 : len(data) // 2 * 2], "<u2")
    if len(header) < 256 or header[1] != 1:
        raise _damaged(path, "its header is cut, or of another version than 1")
    start = 0
    for number in range(int(header[2])):
        example, start = _parse(stream, start, f"example {number}", path)
        _require(
            run, [*example.context, *(i for e in example.endings for i in e)], f"{path}, example {number}"
        )
        yield example
    if start != len(stream):
        raise _damaged(path, "more values follow the last example")


def _parse(stream: Any, start: int, where: str, path: Path) -> tuple[Example, int]:
    """Parse the example at index `start`; also returns the index after it."""
    if start + 6 > len(stream) or stream[start] != _START:
        raise _damaged(path, f"{where} does not begin with {_START}")
    end = start + int(stream[start + 1]) // 2
    label, count, at = int(stream[start + 3]), int(stream[start + 4]), start + 5
    parts: list[list[int]] = []
    for _ in range(count + 1):
        length = int(stream[at]) if at < min(end, len(stream)) else 0
        parts.append(stream[at + 1 : at + 1 + length].tolist())
        at += 1 + length
        if not length or len(parts[-1]) < length:
            raise _damaged(path, f"{where} has an empty part, or is cut")
    if at != end or label >= count:
        raise _damaged(path, f"{where} does not have its stated length, or its label is not an ending's")
    return Example(parts[0], parts[1:], label), end


def _read_lines(path: Path, run: TrainedRun) -> Iterator[Example]:
    encode = run.tokenizer.encode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
                context, endings, label = values["ctx"], values["endings"], values["label"]
            except UnicodeDecodeError:
                raise _wrong_line(path, number, "it is not text") from None
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _wrong_line(path, number, repr(error)) from None
            texts = isinstance(endings, list) and all(isinstance(e, str) and e for e in endings)
            label = int(label) if isinstance(label, str) and label.isdecimal() else label
            if not isinstance(context, str) or not texts or type(label) is not int:
                raise _wrong_line(path, number, "ctx, an ending or label is of another kind")
            if not 0 <= label < len(endings):
                raise _wrong_line(path, number, f"label {label} is not an ending's number")
            start = context.rstrip()
            count = len(encode(start))
            ids = [encode(f"{context} {ending}")[count:] for ending in endings]
            if not all(ids):
                raise _wrong_line(path, number, "an ending adds no token to its context")
            example = Example(run.prompt_ids(start), ids, label)
            _require(run, [*example.context, *(i for e in ids for i in e)], f"{path}:{number}")
            yield example


def _require(run: TrainedRun, ids: Sequence[int], where: str) -> None:
    if max(ids) >= (vocabulary := run.model.config.vocab_size):
        raise UserError(
            f"{where} has the token id {max(ids)}, and the vocabulary of {run.path} ends at "
            f"{vocabulary - 1}; evaluate a model that has these tokens"
        )


def _wrong_line(path: Path, number: int, reason: str) -> UserError:
    return UserError(
        f"{path}:{number} is not an example of the task: {reason}; each line is an object with ctx, endings "
        "and label"
    )


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is a damaged evaluation of llm.c's: {reason}; copy or make it again")
