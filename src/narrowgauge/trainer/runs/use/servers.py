"""Programs that serve models, each in a separate process on the CPU: logits of a sequence, ids of a text.

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
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import format_exception_only
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError
from narrowgauge.system.processes import Answering
from narrowgauge.trainer.checkpoint.interop.gguf_file import GGUF_FILE

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
        process = Answering(_serving, name, str(folder), length, torch.get_num_threads(), str(words))

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
