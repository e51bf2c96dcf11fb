"""Programs that serve models, each in a separate process on the CPU: logits of a sequence, ids of a text.

    llama.cpp       through llama-cpp-python, from a GGUF file
    transformers    AutoModelForCausalLM, plain weights in float32, narrow ones in the dtype of their folder;
                    also as `compressed-tensors`, the package by which it multiplies narrow weights
    vllm            LLM.generate, whose log-probabilities of a prompt stand for logits

transformers alone opens its layers (`served_layers.py`). vLLM 0.32 for CPUs was run; it has no
kernel for NVFP4 or for FP8 under one scale, and keeps plain weights in bfloat16.

A server that crashes ends its process alone, and an error gives its last words. llama.cpp keeps keys and
values in fp16, as it does by default. Its repacked weights are off, because llama-cpp-python 0.3.36 ends with
a segmentation fault in them (Q8_0, on a CPU that reports AMX).
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.checkpoint.interop.gguf.model import GGUF_FILE
from narrowgauge.errors import UserError, unknown
from narrowgauge.processes import Answering, Ended
from narrowgauge.runs.choices import SERVERS
from narrowgauge.runs.use.served_layers import Opened

_GRACE_S = 60.0  # for libraries to end their processes, and to return what they share with others
#: The module of each server, and how to install it.
_MODULES = {
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "transformers": ("transformers", "transformers"),
    "compressed-tensors": ("compressed_tensors", "transformers compressed-tensors"),
    "vllm": ("vllm", "vllm"),
}


def require_installed(name: str) -> None:
    """Check that the package of a server is there.

    Raises:
        UserError: It is not.
    """
    module, package = _MODULES[name]
    if find_spec(module) is None:
        raise UserError(f"{name} is not installed here; python -m pip install {package}")


class Server:
    """A server of the model in a folder; use it in a `with` block."""

    def __init__(self, name: str, folder: Path, length: int) -> None:
        """Start it for sequences of up to `length` tokens.

        Raises:
            UserError: The name is unknown, or the server is not installed.
        """
        if name not in SERVERS:
            raise unknown("server", name, list(SERVERS))
        require_installed(name)
        self.name, self._folder = name, TemporaryDirectory()
        self._words = Path(self._folder.name) / "words"
        self._process = Answering(
            _serving, name, str(folder), length, torch.get_num_threads(), str(self._words)
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end(grace_s=_GRACE_S)
        self._folder.cleanup()

    def version(self) -> str:
        """The version of its package."""
        return str(self._ask("version", None))

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """The logits after each token of a sequence: (T, V)."""
        found: NDArray[np.float32] = self._ask("logits", ids)
        return found

    def layers(self, ids: list[int], names: list[str]) -> dict[str, Opened]:
        """The named layers that the server opens, in a pass over a sequence."""
        return {name: Opened(*parts) for name, parts in self._ask("layers", (ids, names)).items()}

    def ids(self, text: str) -> list[int]:
        """The ids of a text, without those that begin one."""
        return list(self._ask("ids", text))

    def _ask(self, question: str, value: object) -> Any:
        try:
            return self._process.ask((question, value))
        except Ended as ended:
            words = self._words.read_text(errors="replace") if self._words.exists() else ""
            raise UserError(
                f"{self.name} did not serve the model: {_reason(words, ended)}; try another --with or --to, "
                f"or report it to {self.name}"
            ) from None


def _reason(words: str, ended: Ended) -> str:
    """Why a server ended, in a line: the first error among its words, else the error of its process."""
    found = re.search(r".*ASSERT.*|\b[A-Z]\w+Error: .+", words)
    lines = [found.group()] if found else ended.traceback.strip().splitlines()
    return lines[-1] if lines else f"its process ended with code {ended.code}"


@contextmanager
def _serving(
    name: str, folder: str, length: int, threads: int, words: str
) -> Iterator[Callable[[tuple[str, Any]], object]]:
    with open(words, "wb") as file:  # libraries in C and processes of a server write there
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(threads)
    if name == "llama.cpp":
        answers = _llama_cpp(Path(folder), length, threads)
    elif name == "vllm":
        answers = _vllm(Path(folder), length)
    else:
        answers = _transformers(Path(folder))
    try:
        yield lambda request: answers[request[0]](request[1])
    finally:
        answers.get("end", lambda _: None)(None)


def _llama_cpp(folder: Path, length: int, threads: int) -> Mapping[str, Callable[[Any], object]]:
    module = import_module("llama_cpp")
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
        "layers": lambda _: {},  # its Python package has no outputs of layers
        "ids": lambda text: model.tokenize(text.encode("utf-8"), add_bos=False, special=False),
    }


def _vllm(folder: Path, length: int) -> Mapping[str, Callable[[Any], object]]:
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
        "layers": lambda _: {},
        "ids": lambda text: model.get_tokenizer().encode(text, add_special_tokens=False),
        "end": lambda _: model.llm_engine.engine_core.shutdown(),  # its processes outlive this one
    }


def _transformers(folder: Path) -> Mapping[str, Callable[[Any], object]]:
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

    def version(_: object) -> str:
        if not is_narrow:
            return str(module.__version__)
        package = metadata.version("compressed-tensors")
        return f"{module.__version__} with compressed-tensors {package}"

    return {
        "version": version,
        "logits": logits,
        "layers": lambda asked: _opened_layers(model, logits, *asked),
        "ids": ids,
    }


def _opened_layers(
    model: torch.nn.Module, run: Callable[[list[int]], object], ids: list[int], names: list[str]
) -> dict[str, tuple[object, ...]]:
    """The parts of `Opened` of the named layers that the model has."""
    found: dict[str, tuple[object, ...]] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x, y = (t.float().reshape(-1, t.shape[-1]).numpy().copy() for t in (inputs[0], output))
            weight, values = getattr(layer, "weight", None), None
            if weight is not None and weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
                is_linear = isinstance(layer, torch.nn.Linear)  # transformers' Conv1D keeps (K, N)
                values = (weight if is_linear else weight.T).detach().float().numpy()
            found[name] = (x, y, values)

        return see

    modules = dict(model.named_modules())
    handles = [modules[n].register_forward_hook(hook(n)) for n in names if n in modules]
    try:
        run(ids)
    finally:
        for handle in handles:
            handle.remove()
    return found
