"""Compares a trained model with itself behind a server: the same text through both, token by token.

Three forward passes read the held-out text of the run:

    trainer    the run's, under its recipe
    file       the weights of the exported file in float32 arithmetic, by our model
    server     the server's, from the same file

The difference between trainer and server is what a user gets. It has two parts: file and server differ by
the server's arithmetic, and widely if it reads a weight or a scale wrong; trainer and file differ by the
formats of training's inputs, if the file has the codes and scales of training, which is checked.
Log-probabilities are compared over the whole vocabulary, in float64. Of a server that opens its layers, each
is compared by itself in the first sequence (`served_layers.py`).
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from narrowgauge.checkpoint.interop.activations import input_formats
from narrowgauge.checkpoint.interop.external_model import read_external_model
from narrowgauge.checkpoint.interop.gguf.model import GGUF_FILE, read_gguf_model
from narrowgauge.data import validation_batches
from narrowgauge.data.cache import Progress
from narrowgauge.errors import UserError, unknown
from narrowgauge.json_lines import strict_json
from narrowgauge.models import Transformer
from narrowgauge.runs.choices import SERVERS
from narrowgauge.runs.use.export import export_run
from narrowgauge.runs.use.served_layers import (
    LayerDifference,
    first,
    layer_differences,
    layer_names,
    same_weights,
)
from narrowgauge.runs.use.servers import Server, require_installed
from narrowgauge.runs.use.trained_model import TrainedRun, open_run, run_data
from narrowgauge.t_interval import Interval, interval

EQUAL, DIFFERENT, UNDECIDED = "equal", "different", "undecided"

#: The columns of `Served.rows`.
HEAD = ("", "loss", "server less it", "KL", "largest", "log p off by", "largest", "same top")


@dataclass
class Compared:
    """Two forward passes over the same tokens.

    Attributes:
        differences: The second's mean loss of each sequence less the first's, in nats per token.
        kl_mean: The mean of KL(first, second) over positions, in nats.
        kl_max: The largest.
        change_mean: The mean change of the log-probability of the token that follows, as a magnitude.
        change_max: The largest.
        same_top: The share of positions with the same likeliest token.
    """

    differences: list[float] = field(default_factory=list)
    kl_mean: float = 0.0
    kl_max: float = 0.0
    change_mean: float = 0.0
    change_max: float = 0.0
    same_top: float = 0.0

    def add(self, first: torch.Tensor, second: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a sequence, from log-probabilities (T, V) in float64 and the ids that follow (T,)."""
        n, index = len(self.differences), targets[:, None]
        change = second.gather(1, index)[:, 0] - first.gather(1, index)[:, 0]
        kl = (first.exp() * (first - second)).sum(-1)
        same = (first.argmax(-1) == second.argmax(-1)).double().mean()
        for name, value in (("kl_mean", kl.mean()), ("change_mean", change.abs().mean()), ("same_top", same)):
            setattr(self, name, (getattr(self, name) * n + float(value)) / (n + 1))
        self.kl_max = _largest(self.kl_max, kl)
        self.change_max = _largest(self.change_max, change.abs())
        self.differences.append(-float(change.mean()))

    def as_json(self) -> dict[str, Any]:
        """The numbers for programs."""
        return {
            "difference": interval(self.differences).as_json(),
            "kl": {"mean": self.kl_mean, "max": self.kl_max},
            "log_probability_change": {"mean": self.change_mean, "max": self.change_max},
            "same_top_token": self.same_top,
        }


@dataclass(frozen=True)
class Served:
    """What `served` found.

    Attributes:
        run: The run, and its step.
        server: The name and version of the server, and the format it reads.
        sequences: (sequences, tokens of each).
        losses: Nats per token of "trainer", "file" and "server".
        to_trainer: Trainer and server.
        to_file: File and server.
        texts: (texts that the server's tokenizer gives other ids, texts); None without a tokenizer.
        margin: The largest difference of the loss that counts as equal, in nats per token.
        weights: (narrow weights of the file with the codes and scales of training, narrow weights).
        inputs: The formats of the inputs of linear layers in training; none if all are wide.
        layers: The linear layers one by one, in the order of a pass; none if the server opens none.
    """

    run: tuple[Path, int]
    server: tuple[str, str, str]
    sequences: tuple[int, int]
    losses: dict[str, float]
    to_trainer: Compared
    to_file: Compared
    texts: tuple[int, int] | None
    margin: float
    weights: tuple[int, int]
    inputs: tuple[str, ...] = ()
    layers: tuple[LayerDifference, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether the server's loss is the trainer's: `EQUAL`, `DIFFERENT` or `UNDECIDED`.

        It is `EQUAL` if the 95 % interval of the difference over sequences lies within the margin and the
        tokenizers give the same ids, and `UNDECIDED` if the interval crosses the margin.
        """
        return self._judge(self.to_trainer)

    @property
    def file_verdict(self) -> str:
        """The same of the file: if it is not `EQUAL`, the server or the export is at fault."""
        return self._judge(self.to_file)

    @property
    def of_inputs(self) -> Interval | None:
        """What narrow inputs in training make of the difference, in nats per token, over sequences.

        It is the file's loss less the trainer's: the same weights, and wide inputs. None if weights differ,
        if the server computes otherwise than the file, or if inputs are wide in training.
        """
        if not self.inputs or self.weights[0] < self.weights[1] or self.file_verdict != EQUAL:
            return None
        pairs = zip(self.to_trainer.differences, self.to_file.differences, strict=True)
        return interval([of_trainer - of_file for of_trainer, of_file in pairs])

    def _judge(self, compared: Compared) -> str:
        d = interval(compared.differences)
        if (self.texts and self.texts[0]) or not math.isfinite(d.mean):
            return DIFFERENT
        if -self.margin <= d.low and d.high <= self.margin:
            return EQUAL
        return DIFFERENT if d.low > self.margin or d.high < -self.margin else UNDECIDED

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        name, version, format = self.server
        return strict_json(
            {
                **{"run": str(self.run[0]), "step": self.run[1]},
                **{"server": name, "version": version, "format": format},
                **{"sequences": self.sequences[0], "sequence_length": self.sequences[1]},
                **{"losses": self.losses, "margin": self.margin},
                **{"verdict": self.verdict, "file_verdict": self.file_verdict},
                "trainer_and_server": self.to_trainer.as_json(),
                "file_and_server": self.to_file.as_json(),
                **{"equal_weights": self.weights[0], "weights": self.weights[1], "inputs": self.inputs},
                "inputs_alone": None if self.of_inputs is None else self.of_inputs.as_json(),
                "texts_with_other_ids": None if self.texts is None else self.texts[0],
                "first_other_tensor": first(self.layers, "has_other_weight"),
                "first_other_layer": first(self.layers, "disagrees"),
                "layers": [layer.as_json() for layer in self.layers],
            }
        )

    def subject(self) -> str:
        """What was compared, in one line."""
        name, version, format = self.server
        count, length = self.sequences
        return (
            f"{self.run[0]} at step {self.run[1]}, {count} sequences of {length} tokens, "
            f"served by {name} {version} from {format}"
        )

    def rows(self) -> list[list[str]]:
        """The numbers of the passes as texts, with `HEAD`."""
        rows = []
        for which, c in (("trainer", self.to_trainer), ("file", self.to_file)):
            mean = interval(c.differences).mean
            numbers = [f"{self.losses[which]:.5f}", f"{mean:+.5f}", f"{c.kl_mean:.2g}", f"{c.kl_max:.2g}"]
            rows.append([which, *numbers, f"{c.change_mean:.2g}", f"{c.change_max:.2g}", f"{c.same_top:.2%}"])
        return [*rows, ["server", f"{self.losses['server']:.5f}", *[""] * 6]]

    def sentences(self) -> list[str]:
        """The verdicts."""
        lines = []
        if self.texts is not None:
            lines.append(f"{self.texts[0]} of {self.texts[1]} texts have other ids in the server")
        for which, c, verdict in (
            ("trainer", self.to_trainer, self.verdict),
            ("file", self.to_file, self.file_verdict),
        ):
            d = interval(c.differences)
            lines.append(
                f"server and {which}: {verdict} within {self.margin:g} nats per token "
                f"({d.mean:+.5f}, 95 % {d.low:+.5f} to {d.high:+.5f})"
            )
        if self.weights[1]:
            lines.append(
                f"{self.weights[0]} of {self.weights[1]} narrow weights of the file have the codes and "
                "scales of training"
            )
        if self.of_inputs is not None:
            d, names = self.of_inputs, " and ".join(self.inputs)
            lines.append(
                f"of the difference, inputs that training rounds to {names} make {d.mean:+.5f} "
                f"(95 % {d.low:+.5f} to {d.high:+.5f}), and the server's arithmetic makes the rest"
            )
        if not self.layers:
            return [*lines, f"layers: not compared, because {self.server[0]} does not open its layers here"]
        tensor, layer = first(self.layers, "has_other_weight"), first(self.layers, "disagrees")
        if tensor:
            lines.append(f"first tensor that is not the trainer's: {tensor}")
        if layer:
            lines.append(
                f"first layer whose output is not the trainer's, with its inputs or wide ones: {layer}"
            )
        if not (tensor or layer):
            lines.append(f"layers: all {len(self.layers)} agree, each on the server's input")
        return lines

    def table(self) -> str:
        """The result as text."""
        widths = (8, 9, 14, 8, 8, 12, 8, 8)
        lines = [self.subject(), ""]
        for name, *cells in (HEAD, *self.rows()):
            texts = [f"{name:8}", *(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))]
            lines.append("  ".join(texts).rstrip())
        return "\n".join([*lines, "", *self.sentences()])


def served(
    run: Path,
    server: str,
    format: str | None = None,
    folder: Path | None = None,
    data: str | None = None,
    sequences: int = 16,
    sequence_length: int | None = None,
    margin: float = 0.01,
    progress: Progress | None = None,
) -> Served:
    """Compare a run with itself behind a server on this machine.

    Args:
        run: A run, or any model that `open_run` opens.
        server: One of `SERVERS`.
        format: The format of `export` that the server reads; None for the server's first.
        folder: An export of this run, to be served as it is; None for a new one in a temporary folder.
        data: A source of text; None for the run's.
        sequences: The number of held-out sequences, at least 2.
        sequence_length: Their tokens; None for the run's.
        margin: The largest difference of the loss that counts as equal, in nats per token.
        progress: Called with the stage of preparing the text.

    Raises:
        UserError: An argument is invalid, the run cannot be exported, or the server fails.
    """
    if server not in SERVERS:
        raise unknown("server", server, list(SERVERS))
    if format is not None and format not in SERVERS[server]:
        raise unknown(f"format of {server}", format, list(SERVERS[server]))
    if sequences < 2 or not margin > 0:
        raise UserError(
            f"{sequences} sequences and a margin of {margin:g} give no interval to judge; use at least 2 and "
            "more than 0, such as 16 and 0.01"
        )
    require_installed(server)  # before the text is prepared, and a large model is exported
    format = format or SERVERS[server][0]
    trained = open_run(run, "cpu")
    length = sequence_length or trained.config.data.sequence_length
    windows = list(validation_batches(run_data(trained, data, progress).val, 1, length, sequences=sequences))
    with _exported(trained, format, folder) as files, Server(server, files, length) as program:
        plain = _plain(files, trained)
        version, losses = program.version(), dict.fromkeys(("trainer", "file", "server"), 0.0)
        to_trainer, to_file = Compared(), Compared()
        for number, window in enumerate(windows):
            ids, targets = window.x_BT, window.y_BT[0]
            trained.go_to_sample(number)
            with torch.no_grad():
                passes = {"trainer": trained.model(ids)[0], "file": plain(ids)[0]}
            theirs = torch.from_numpy(program.logits(ids[0].tolist()))
            if theirs.shape != passes["file"].shape:
                raise UserError(
                    f"{server} gives logits of shape {tuple(theirs.shape)}, and the run "
                    f"{tuple(passes['file'].shape)}; serve an export of this run"
                )
            logs = {name: t.double().log_softmax(-1) for name, t in (passes | {"server": theirs}).items()}
            for name, log in logs.items():
                losses[name] -= float(log.gather(1, targets[:, None]).mean()) / len(windows)
            to_trainer.add(logs["trainer"], logs["server"], targets)
            to_file.add(logs["file"], logs["server"], targets)
        trained.go_to_sample(0)
        opened = program.layers(windows[0].x_BT[0].tolist(), layer_names(trained.model))
        layers = layer_differences(trained, opened)
        texts = _other_ids(trained, program, [window.x_BT[0].tolist() for window in windows])
        weights, inputs = same_weights(trained, plain), tuple(input_formats(trained.model))
    of_run, of_server = (run, trained.step), (server, version, format)
    subject = (of_run, of_server, (len(windows), length))
    return Served(*subject, losses, to_trainer, to_file, texts, margin, weights, inputs, tuple(layers))


@contextmanager
def _exported(trained: TrainedRun, format: str, folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "served"
        export_run(trained.path, format, out)
        yield out


def _plain(folder: Path, trained: TrainedRun) -> Transformer:
    """Our model in float32, with the weights of the files."""
    if (folder / GGUF_FILE).is_file():
        weights = read_gguf_model(folder / GGUF_FILE, trained.config.spec.model)
    else:
        weights = dict(read_external_model(folder).tensors)
    model = Transformer(trained.config.spec.model)
    if not torch.equal(weights["embedding.weight"], weights["head.weight"]):
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())  # no longer tied
    model.load_state_dict(weights)
    return model.eval()


def _other_ids(trained: TrainedRun, server: Server, sequences: list[list[int]]) -> tuple[int, int] | None:
    """How many texts the server's tokenizer gives other ids than the run's, and of how many."""
    if trained.tokenizer_file is None or trained.config.data.tokenizer.startswith("ids-"):
        return None
    tokenizer = trained.tokenizer
    ends = [list(takewhile(lambda i: i != tokenizer.end_of_document, ids)) for ids in sequences]
    texts = [text for ids in ends if (text := tokenizer.decode(ids))]
    return sum(server.ids(text) != tokenizer.encode(text) for text in texts), len(texts)


def _largest(before: float, values: torch.Tensor) -> float:
    return max(before, float(values.max())) if bool(values.isfinite().all()) else math.nan
