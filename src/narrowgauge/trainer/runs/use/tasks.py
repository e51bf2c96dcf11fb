"""Tasks of evaluation: HellaSwag as llm.c reports it, and those of the lm-evaluation-harness.

HellaSwag's is to choose the likeliest continuation of a context:

    acc         the share of examples whose right ending has the highest log probability
    acc_norm    the same by log probability per token, as llm.c reports it

(Task: Zellers et al., arXiv 1905.07830; with another tokenizer than GPT-2's, `lm-eval:hellaswag`.) llm.c's
evaluation file (karpathy/llm.c, `dev/data/data_common.py`), little-endian, tokens of GPT-2:

    256 x int32    [0] 20240522   [1] 1   [2] number of examples   [3] longest example in bytes
    per example    uint16: 65535, bytes of the example, index, label, number of endings E,
                   length and tokens of the context, then E times length and tokens of an ending

The harness loads models through transformers, so a run is first exported to a temporary folder. It evaluates
the plain weights, without the arithmetic of the recipe.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.huggingface import CONFIG
from narrowgauge.trainer.data.token_files.tokens import LlmcMagic
from narrowgauge.trainer.models import Transformer
from narrowgauge.trainer.runs.use.export import export_run
from narrowgauge.trainer.runs.use.trained_model import TrainedRun

#: Token ids of a context, those of its endings, and the index of the right one.
Example = tuple[list[int], list[list[int]], int]

_START = 65535
_GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Score:
    """The shares of right answers among `examples`."""

    examples: int
    acc: float
    acc_norm: float


def evaluate(run: TrainedRun, path: Path, limit: int | None = None) -> Score:
    """Score a model on the first `limit` examples of a file; None for all."""
    right = right_norm = count = 0
    for context, endings, label in islice(read_examples(path, run), limit):
        total, lengths = _log_probabilities(run.model, context, endings)
        right += int(total.argmax()) == label
        right_norm += int((total / lengths).argmax()) == label
        count += 1
    if not count:
        raise UserError(f"{path} holds no example; name the task's file")
    return Score(count, right / count, right_norm / count)


@torch.no_grad()
def _log_probabilities(
    model: Transformer, context: list[int], endings: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log probability, number of tokens) of each ending after the context, in one batch."""
    longest = max(map(len, endings))
    # A context that is too long loses its beginning, but keeps at least one token to predict from.
    context = context[-max(1, model.config.max_sequence_length + 1 - longest) :]
    rows = [[*context, *ending, *[0] * (longest - len(ending))] for ending in endings]
    ids_EL = torch.tensor(rows, device=model.embedding.weight.device)
    logits_ELV = model.head(model.hidden(ids_EL[:, :-1])[:, len(context) - 1 :])
    log_p_ELV = logits_ELV.float().log_softmax(dim=-1)
    log_p_EL = log_p_ELV.gather(2, ids_EL[:, len(context) :, None])[..., 0].cpu()
    lengths_E = torch.tensor([len(ending) for ending in endings])
    is_ending_EL = torch.arange(longest)[None] < lengths_E[:, None]
    return torch.where(is_ending_EL, log_p_EL, 0.0).sum(1), lengths_E


def read_examples(path: Path, run: TrainedRun) -> Iterator[Example]:
    """Read the examples of a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name the task's file") from None
    if data[:4] != LlmcMagic.EVALUATION.to_bytes(4, "little"):
        raise UserError(
            f"{path} is not an evaluation file of llm.c, such as hellaswag_val.bin; name one, or use "
            "--task lm-eval:hellaswag"
        )
    if run.tokenizer_file is not None and run.tokenizer.vocab_size != _GPT2_VOCABULARY:
        raise UserError(
            f"{path} holds tokens of GPT-2's tokenizer, and that of {run.path} has "
            f"{run.tokenizer.vocab_size} ids; use --task lm-eval:hellaswag"
        )
    header, stream = np.frombuffer(data[:1024], "<i4"), np.frombuffer(data[1024 : len(data) // 2 * 2], "<u2")
    if len(header) < 256 or header[1] != 1:
        raise _damaged(path, "its header is cut, or of another version than 1")
    start, vocabulary = 0, run.model.config.vocab_size
    for number in range(int(header[2])):
        (context, endings, label), start = _parse(stream, start, f"example {number}", path)
        if (largest := max(map(max, (context, *endings)))) >= vocabulary:
            raise UserError(
                f"{path}, example {number} has the token id {largest}, and the vocabulary of {run.path} ends "
                f"at {vocabulary - 1}; evaluate a model that has these tokens"
            )
        yield context, endings, label
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
    return (parts[0], parts[1:], label), end


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is a damaged evaluation of llm.c's: {reason}; copy or make it again")


def harness_scores(
    run: Path,
    tasks: list[str],
    device: str,
    limit: int | None = None,
    task_folder: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """The results of a run, or of any model that `open_run` opens, by task and metric.

    The harness has the tasks, or YAML files in `task_folder` describe them; `limit` is the number of examples
    of each, None for all.
    """
    try:  # on demand, because the import takes a second
        import_module("lm_eval.models.huggingface")
        harness, manager = import_module("lm_eval"), import_module("lm_eval.tasks").TaskManager
    except ImportError as error:
        raise UserError(
            f"the lm-evaluation-harness cannot be imported ({error}); "
            "python -m pip install lm-eval transformers accelerate"
        ) from None
    known = manager(include_path=None if task_folder is None else str(task_folder))
    if unknown := [task for task in tasks if not known.match_tasks([task])]:
        raise UserError(
            f"the lm-evaluation-harness knows no task {unknown[0]!r}; 'lm-eval ls tasks' lists them, and "
            "--task-folder names a folder of others"
        )
    with TemporaryDirectory() as temporary:
        folder = run
        if not (run / CONFIG).is_file():
            folder = Path(temporary) / "model"
            export_run(run, "hf", folder)
        evaluation = harness.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=tasks,
            task_manager=known,
            device=device,
            limit=limit,
            batch_size=1,
            bootstrap_iters=0,
        )
    results: dict[str, dict[str, Any]] = evaluation["results"]
    return results
