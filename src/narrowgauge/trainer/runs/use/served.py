"""Compares a trained model with itself behind a server: its files first, then one text through both.

Files that were exported earlier are compared with a new export, tensor by tensor: one other code or scale is
a difference, whatever the loss. Then three forward passes read the held-out text of the run:

    trainer    the run's, under its recipe
    file       the weights of the exported file in float32 arithmetic, by our model
    server     the server's, from the same file

The difference between trainer and server is what a user gets. File and server differ by the server's
arithmetic, and widely if it reads a weight or a scale wrong; trainer and file differ by the formats of
training's inputs. Log-probabilities are compared over the whole vocabulary, in float64.

Programs serve models each in a separate process on the CPU: logits of a sequence, ids of a text.

    llama.cpp       through llama-cpp-python, from a GGUF file
    transformers    AutoModelForCausalLM, plain weights in float32, narrow ones in the dtype of their folder;
                    also as `compressed-tensors`, the package by which it multiplies narrow weights
    vllm            LLM.generate, whose log-probabilities of a prompt stand for logits; vLLM 0.32 for CPUs has
                    no kernel for NVFP4 or for FP8 under one scale, and keeps plain weights in bfloat16

A server that crashes ends its process alone, and an error gives its last words. llama.cpp keeps keys and
values in fp16, as it does by default. Its repacked weights are off, because llama-cpp-python 0.3.36 crashes
in them (Q8_0, on a CPU that reports AMX).
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import format_exception_only
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.processes import Worker
from narrowgauge.system.t_interval import Interval, interval
from narrowgauge.trainer.checkpoint.interop import read_back
from narrowgauge.trainer.checkpoint.interop.activations import input_formats
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.gguf_file import GGUF_FILE
from narrowgauge.trainer.checkpoint.interop.quantized_export import narrow_layers
from narrowgauge.trainer.data import Progress, validation_batches
from narrowgauge.trainer.runs.choices import SERVERS
from narrowgauge.trainer.runs.use import export
from narrowgauge.trainer.runs.use.trained_model import TrainedRun, open_run, plain_model, run_data

EQUAL, DIFFERENT, UNDECIDED = "equal", "different", "undecided"

_HEAD = ("", "loss", "server less it", "KL", "largest", "log p off by", "largest", "same top")
_SUBJECT = (
    "{run} at step {step}, {sequences} sequences of {sequence_length} tokens, served by {server} {version} "
    "from {format}"
)
_ROW = "{:8}  {:>9}  {:>14}  {:>8}  {:>8}  {:>12}  {:>8}  {:>8}"
_LISTED = 5  # tensors that the text names; JSON has all


@dataclass
class Compared:
    """Two forward passes over the same tokens: numbers of each sequence, then of each position."""

    differences: list[float] = field(default_factory=list)  #: the second's mean loss less the first's, nats
    kl: list[float] = field(default_factory=list)  #: KL(first, second), in nats
    change: list[float] = field(default_factory=list)  #: of the log-probability of the token that follows
    same_top: list[float] = field(default_factory=list)  #: 1 where both have the same likeliest token

    def add(self, first: torch.Tensor, second: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a sequence, from log-probabilities (T, V) in float64 and the ids that follow (T,)."""
        change = (second - first).gather(1, targets[:, None])[:, 0]
        self.differences.append(-float(change.mean()))
        self.kl += (first.exp() * (first - second)).sum(-1).tolist()
        self.change += change.abs().tolist()
        self.same_top += (first.argmax(-1) == second.argmax(-1)).double().tolist()

    def as_json(self) -> dict[str, Any]:
        """The numbers for programs: means and largest values over positions, NaN if one is not a number."""
        kl, change, same = (torch.tensor(v).double() for v in (self.kl, self.change, self.same_top))
        kinds = {"kl": kl, "log_probability_change": change}
        return {
            "difference": interval(self.differences).as_json(),
            **{name: {"mean": float(v.mean()), "max": float(v.max())} for name, v in kinds.items()},
            "same_top_token": float(same.mean()),
        }


@dataclass(frozen=True)
class Served:
    """What `served` found; losses are in nats per token."""

    #: "run" and "step"; "server", "version" and the "format" that it reads; "sequences", "sequence_length"
    subject: dict[str, Any]
    losses: dict[str, float]  #: of "trainer", "file" and "server"
    to_trainer: Compared  #: trainer and server
    to_file: Compared  #: file and server
    texts: tuple[int, int] | None  #: (texts with other ids in the server, texts); None without a tokenizer
    margin: float  #: the largest difference of the loss that counts as equal
    weights: tuple[int, int]  #: (narrow weights with the codes and scales of training, narrow weights)
    inputs: tuple[str, ...] = ()  #: the formats of the inputs of linear layers in training, where narrow
    different: tuple[read_back.Difference, ...] = ()  #: the tensors of the file that are not those of the run

    @property
    def verdict(self) -> str:
        """Whether the server's model is the trainer's: `EQUAL`, `DIFFERENT` or `UNDECIDED`.

        It is `EQUAL` if all tensors of the file are the run's, the 95 % interval of the difference over
        sequences lies within the margin and the tokenizers give the same ids, and `UNDECIDED` if the interval
        crosses the margin.
        """
        return DIFFERENT if self.different else self._judge(self.to_trainer)

    @property
    def file_verdict(self) -> str:
        """The same of the loss of the file: if it is not `EQUAL`, the server or the export is at fault."""
        return self._judge(self.to_file)

    @property
    def of_inputs(self) -> Interval | None:
        """What narrow inputs in training make of the difference, in nats per token, over sequences.

        It is the file's loss less the trainer's: the same weights, and wide inputs. None if tensors differ,
        if the server computes otherwise than the file, or if inputs are wide in training.
        """
        if not self.inputs or self.different or self.file_verdict != EQUAL:
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
        values = {
            **self.subject,
            **{"losses": self.losses, "margin": self.margin},
            **{"verdict": self.verdict, "file_verdict": self.file_verdict},
            "trainer_and_server": self.to_trainer.as_json(),
            "file_and_server": self.to_file.as_json(),
            **{"equal_weights": self.weights[0], "weights": self.weights[1], "inputs": self.inputs},
            "inputs_alone": None if self.of_inputs is None else self.of_inputs.as_json(),
            "texts_with_other_ids": None if self.texts is None else self.texts[0],
            "first_other_tensor": self.different[0].name if self.different else None,
            "other_tensors": [difference._asdict() for difference in self.different],
        }
        return json.loads(json.dumps(values), parse_constant=lambda _: None)  # strict, without NaN

    def table(self) -> str:
        """The result as text."""
        lines = [_SUBJECT.format(**self.subject), "", _ROW.format(*_HEAD)]
        for which, c in (("trainer", self.to_trainer), ("file", self.to_file)):
            n, mean = c.as_json(), f"{interval(c.differences).mean:+.5f}"
            numbers = [f"{v:.2g}" for name in ("kl", "log_probability_change") for v in n[name].values()]
            top = f"{n['same_top_token']:.2%}"
            lines.append(_ROW.format(which, f"{self.losses[which]:.5f}", mean, *numbers, top))
        return "\n".join([*lines, f"{'server':8}  {self.losses['server']:>9.5f}", "", *self._sentences()])

    def _sentences(self) -> Iterator[str]:
        if self.different:
            yield f"different: tensors of the files that are not the run's: {len(self.different)}"
            yield from (f"{difference}" for difference in self.different[:_LISTED])
        if self.texts is not None:
            yield f"{self.texts[0]} of {self.texts[1]} texts have other ids in the server"
        for which, c in (("trainer", self.to_trainer), ("file", self.to_file)):
            d = interval(c.differences)
            yield (
                f"losses of server and {which}: {self._judge(c)} within {self.margin:g} nats per token "
                f"({d.mean:+.5f}, 95 % {d.low:+.5f} to {d.high:+.5f})"
            )
        if self.weights[1]:
            equal, all = self.weights
            yield f"{equal} of {all} narrow weights of the file have the codes and scales of training"
        if (alone := self.of_inputs) is not None:
            yield (
                f"of the difference, inputs that training rounds to {' and '.join(self.inputs)} make "
                f"{alone.mean:+.5f} (95 % {alone.low:+.5f} to {alone.high:+.5f}), and the server's "
                "arithmetic makes the rest"
            )


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
    """Compare a run with itself behind a server on this machine; the arguments are the options of the verb.

    `folder` is an export of this run, to be served as it is; None for a new one in a temporary folder.
    """
    if server not in SERVERS:
        raise unknown("server", server, list(SERVERS))
    format = format or (SERVERS[server][0] if folder is None else export.format_of(folder))
    if format not in SERVERS[server]:
        raise unknown(f"format of {server}", format, list(SERVERS[server]))
    if sequences < 2 or not margin > 0:
        raise UserError(
            f"{sequences} sequences and a margin of {margin:g} give no interval to judge; use at least 2 and "
            "more than 0, such as 16 and 0.01"
        )
    require_installed(server)  # before the text is prepared, and a large model is exported
    trained = open_run(run, "cpu")
    length = sequence_length or trained.config.data.sequence_length
    windows = list(validation_batches(run_data(trained, data, progress).val, 1, length, sequences=sequences))
    scaled = export.layers_with_scales(trained.model)
    with TemporaryDirectory() as temporary, export.input_amaxes(scaled) as amaxes:
        files, different = folder or Path(temporary) / "served", list[read_back.Difference]()
        if folder is None:
            export.export_model(trained, format, files)
        else:
            different = export.differences_from_run(folder, trained, format)
        plain = plain_model(read_external_model(files))
        losses = dict.fromkeys(("trainer", "file", "server"), 0.0)
        to_trainer, to_file = Compared(), Compared()
        with serve(server, files, length) as ask:
            version = ask("version")
            for number, window in enumerate(windows):
                ids, targets = window.x_BT, window.y_BT[0]
                trained.go_to_sample(number)
                with torch.no_grad():
                    passes = {"trainer": trained.model(ids)[0], "file": plain(ids)[0]}
                passes["server"] = torch.from_numpy(ask("logits", ids[0].tolist()))
                logs = {name: t.double().log_softmax(-1) for name, t in passes.items()}
                for name, log in logs.items():
                    losses[name] -= float(log.gather(1, targets[:, None]).mean()) / len(windows)
                to_trainer.add(logs["trainer"], logs["server"], targets)
                to_file.add(logs["file"], logs["server"], targets)
            texts = _other_ids(trained, ask, [window.x_BT[0].tolist() for window in windows])
        if folder is not None and read_back.has_input_scales(folder):
            different += read_back.wrong_input_scales(folder, trained.model, amaxes)
    narrow = narrow_layers(trained.model)
    pairs = [(plain.get_parameter(f"{n}.weight"), layer.forward_weight()) for n, layer in narrow.items()]
    weights = (sum(read_back.is_same(theirs, ours) for theirs, ours in pairs), len(pairs))
    subject = {"run": str(run), "step": trained.step, "server": server, "version": version, "format": format}
    subject |= {"sequences": len(windows), "sequence_length": length}
    inputs = tuple(input_formats(trained.model))
    return Served(subject, losses, to_trainer, to_file, texts, margin, weights, inputs, tuple(different))


def _other_ids(
    trained: TrainedRun, ask: Callable[..., Any], sequences: list[list[int]]
) -> tuple[int, int] | None:
    """How many texts the server's tokenizer gives other ids than the run's, and of how many."""
    if trained.tokenizer_file is None or trained.config.data.tokenizer.startswith("ids-"):
        return None
    tokenizer = trained.tokenizer
    ends = [list(takewhile(lambda i: i != tokenizer.end_of_document, ids)) for ids in sequences]
    texts = [text for ids in ends if (text := tokenizer.decode(ids))]
    return sum(ask("ids", text) != tokenizer.encode(text) for text in texts), len(texts)


Answers = Mapping[str, Callable[[Any], Any]]
_GRACE_S = 60.0  # for libraries to end their processes, and to return what they share with others
#: The module of each server, and how to install it.
_MODULES = {
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "transformers": ("transformers", "transformers"),
    "compressed-tensors": ("compressed_tensors", "transformers compressed-tensors"),
    "vllm": ("vllm", "vllm"),
}


def require_installed(name: str) -> None:
    """Check that the package of a server is there; a `UserError` if not."""
    module, package = _MODULES[name]
    if find_spec(module) is None:
        raise UserError(f"{name} is not installed here; python -m pip install {package}")


@contextmanager
def serve(name: str, folder: Path, length: int) -> Iterator[Callable[..., Any]]:
    """Serve the model in a folder, for sequences of up to `length` tokens; `ask(question, value)` answers.

    version           of its package
    logits   ids      float32 (T, V), after each token
    ids      text     without those that begin a text
    """
    with TemporaryDirectory() as temporary:
        words = Path(temporary) / "words"
        process = Worker(_serving, name, str(folder), length, torch.get_num_threads(), str(words))

        def ask(question: str, value: object = None) -> Any:
            try:
                return process.ask((question, value))
            except Exception as error:
                said = words.read_text(errors="replace") if words.exists() else ""
                found = re.search(r".*ASSERT.*|\b[A-Z]\w+Error: .+", said)
                reason = found.group() if found else format_exception_only(error)[-1].strip()
                raise UserError(
                    f"{name} did not serve the model: {reason}; try another --with or --to, or report it to "
                    f"{name}"
                ) from None

        try:
            yield ask
        finally:
            process.end(grace_s=_GRACE_S)


@contextmanager
def _serving(
    name: str, folder: str, length: int, threads: int, words: str
) -> Iterator[Callable[[tuple[str, Any]], object]]:
    with open(words, "wb") as file:  # libraries in C and processes of a server write there
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(threads)
    serve = {"llama.cpp": _llama_cpp, "vllm": _vllm}.get(name, _transformers)
    answers = serve(Path(folder), length)
    try:
        yield lambda request: answers[request[0]](request[1])
    finally:
        answers.get("end", lambda _: None)(None)


def _llama_cpp(folder: Path, length: int) -> Answers:
    module, threads = import_module("llama_cpp"), torch.get_num_threads()
    defaults = module.llama_cpp.llama_model_default_params

    def without_repacking() -> Any:
        values = defaults()
        values.use_extra_bufts = False
        return values

    module.llama_cpp.llama_model_default_params = without_repacking
    options = {"n_ctx": length, "n_batch": length, "logits_all": True, "verbose": False}
    model = module.Llama(str(folder / GGUF_FILE), **options, n_threads=threads, n_threads_batch=threads)

    def logits(ids: list[int]) -> NDArray[np.float32]:
        model.reset()
        model.eval(ids)
        return np.array(model.scores[: len(ids)], np.float32)

    return {
        "version": lambda _: module.__version__,
        "logits": logits,
        "ids": lambda text: model.tokenize(text.encode("utf-8"), add_bos=False, special=False),
    }


def _vllm(folder: Path, length: int) -> Answers:
    module = import_module("vllm")
    model = module.LLM(model=str(folder), max_model_len=length + 2, max_logprobs=-1, enforce_eager=True)
    asked = module.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False)

    def logits(ids: list[int]) -> NDArray[np.float32]:
        prompt = {"prompt_token_ids": [*ids, ids[-1]]}  # the first token of a prompt has no probabilities
        (found,) = model.generate([prompt], asked, use_tqdm=False)
        rows = [{i: entry.logprob for i, entry in row.items()} for row in found.prompt_logprobs[1:]]
        return np.array([[row[i] for i in range(len(row))] for row in rows], np.float32)

    return {
        "version": lambda _: module.__version__,
        "logits": logits,
        "ids": lambda text: model.get_tokenizer().encode(text, add_special_tokens=False),
        "end": lambda _: model.llm_engine.engine_core.shutdown(),  # its processes outlive this one
    }


def _transformers(folder: Path, _: int) -> Answers:
    module = import_module("transformers")
    is_narrow = "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = "auto" if is_narrow else torch.float32
    model = module.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def logits(ids: list[int]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = model(torch.tensor([ids])).logits[0].float().numpy()
        return found

    def ids(text: str) -> list[int]:
        tokenizer = module.AutoTokenizer.from_pretrained(folder)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    package = f" with compressed-tensors {metadata.version('compressed-tensors')}" if is_narrow else ""
    return {"version": lambda _: module.__version__ + package, "logits": logits, "ids": ids}
