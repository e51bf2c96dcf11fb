"""Exports runs to the formats of other programs, and imports their models as runs.

    export    RUN -> plain weights under another program's names     hf, llmc
                  -> the quantized weights themselves                compressed-tensors, modelopt, gguf
    import    a model of another program -> RUN, to sample, evaluate or train from

Both create their folder atomically. An export is read back and compared with the weights that the run
multiplies.

Scales of activations come from a text, or from what the recipe remembers. The text passes through the model
under its recipe, in sequences of the run's length; the amax of each layer's input gives its scale. A fixed
scale clips what is larger in another text, so it should be like the text that will be served.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from narrowgauge.exchange import TARGETS
from narrowgauge.nn import DTYPES, Linear
from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import staged_directory
from narrowgauge.trainer.checkpoint import save
from narrowgauge.trainer.checkpoint.interop import activations, gguf_model, read_back
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.gguf_file import GGUF_FILE, read_gguf
from narrowgauge.trainer.checkpoint.interop.huggingface import CONFIG, TOKENIZER_CONFIG, write_folder
from narrowgauge.trainer.checkpoint.interop.llmc import write_llmc
from narrowgauge.trainer.checkpoint.interop.quantized_export import narrow_layers, write_quantized
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import inside, read_json
from narrowgauge.trainer.data import load_tokenizer, validation_batches
from narrowgauge.trainer.runs.choices import EXPORT_FORMATS, READERS, RECORDED
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.runs.use.trained_model import TrainedRun, imported_config, open_run, run_data

#: The formats that hold the codes and scales of the forward matmul.
QUANTIZED = ("compressed-tensors", "modelopt")
#: The most sequences that calibration reads, spread evenly over the text.
SEQUENCES = 128


def export_run(
    run: Path, to: str, out: Path, dtype: str | None = None, calibrate: str | None = None
) -> tuple[TrainedRun, list[str]]:
    """Write the newest model of a run, or of any model that `open_run` opens, into a new folder.

    Args:
        run: a run directory, or any model that `open_run` opens.
        to: one of `EXPORT_FORMATS`.
        out: the new folder, which must not exist.
        dtype: the dtype of plain weights, "fp32", "bf16" or "fp16"; None for fp32, or bf16 with
            quantized weights; of gguf for the narrower of bf16 and fp32 that is exact.
        calibrate: where the stored scales of activations come from: a source of text, or `RECORDED` for the
            recipe's own; None to store none. Only with a format in `QUANTIZED`.

    Returns:
        The run, and sentences on what the format holds in another way.
    """
    require_format(to, dtype, calibrate)
    source = open_run(run, "cpu")
    return source, export_model(source, to, out, dtype, calibrate)


def require_format(to: str, dtype: str | None, calibrate: str | None) -> None:
    """Refuse arguments of `export_run` that no model makes right."""
    if to not in EXPORT_FORMATS and to.lower() in READERS:
        *others, last = READERS[to.lower()]
        formats = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"unknown format {to!r}; {to} is a program, and --to takes what it reads: {formats}")
    if to not in EXPORT_FORMATS and to in TARGETS:
        raise UserError(
            f"unknown format {to!r}; 'narrowgauge recipes NAME --to {to}' writes a recipe for it, and export "
            f"writes weights ({', '.join(EXPORT_FORMATS)})"
        )
    if to not in EXPORT_FORMATS:
        raise unknown("format", to, EXPORT_FORMATS)
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if calibrate is not None and to not in QUANTIZED:
        raise UserError(
            f"{to} holds no scales of activations, so --calibrate has no effect there; leave it out, or use "
            f"--to {' or '.join(QUANTIZED)}"
        )


def export_model(
    source: TrainedRun, to: str, out: Path, dtype: str | None = None, calibrate: str | None = None
) -> list[str]:
    """`export_run` of a run that is open; returns the sentences."""
    scales = {} if calibrate is None else activation_scales(source, calibrate)
    with staged_directory(out) as folder:
        remarks = write_export(folder, source, to, dtype, scales)
        try:
            _read_back(folder, source, to, dtype, scales)
        except UserError as error:  # about a folder that is then deleted
            raise UserError(str(error).replace(str(folder), str(out))) from error
        if to in ("llmc", "gguf") and source.tokenizer_file is not None:
            source.tokenizer.save(folder / "tokenizer.json")
    return remarks


def write_export(
    folder: Path, source: TrainedRun, to: str, dtype: str | None, scales: Mapping[str, float]
) -> list[str]:
    """Fill an empty folder with the files of a format; returns the sentences on what is held otherwise."""
    model, weights, stored = source.model, source.weights(), _plain_dtype(to, dtype)
    tokenizer, special = source.tokenizer_file, source.special_tokens
    if to == "gguf":
        plain = stored if dtype else None  # the narrower of bf16 and fp32 that is exact
        remarks = gguf_model.write_gguf_model(folder / GGUF_FILE, model, weights, tokenizer, plain, special)
        return remarks + activations.in_llama_cpp(model)
    if to in QUANTIZED:
        return write_quantized(folder, model, weights, tokenizer, stored, special, scales, to)
    if to == "hf":
        write_folder(folder, model.config, weights, tokenizer, stored, special)
    else:
        write_llmc(folder / "model.bin", model.config, weights, stored)
    return activations.before_the_casts(model)


def _plain_dtype(to: str, dtype: str | None) -> torch.dtype:
    return DTYPES[dtype or ("bf16" if to in QUANTIZED else "fp32")]


def _read_back(
    folder: Path, source: TrainedRun, to: str, dtype: str | None, scales: Mapping[str, float]
) -> None:
    """Refuse files that do not hold what the run multiplies, or the scales of activations."""
    model, weights, stored = source.model, source.weights(), _plain_dtype(to, dtype)
    if to == "gguf":
        found = gguf_model.read_gguf_model(read_gguf(folder / GGUF_FILE), model.config)
        values = gguf_model.expected_values(model, weights, stored if dtype else None)
        read_back.require_read_back(found, values)
        return
    expected = {name: weight.to(stored).float() for name, weight in weights.items()}
    if to in QUANTIZED:
        narrow = narrow_layers(model)
        expected |= {f"{name}.weight": layer.forward_weight() for name, layer in narrow.items()}
        amaxes = {}
        for name, scale in scales.items():
            cast = narrow[name].spec.casts["fprop.x"]
            amaxes[name] = activations.amax_of_scale(cast, scale, cast.block is not None)
        for wrong in read_back.wrong_input_scales(folder, model, amaxes, within=1 + 2.0**-20):
            raise UserError(f"the exported files were read back, and {wrong}; nothing was kept")
    read_back.require_read_back(read_external_model(folder).tensors, expected)


def activation_scales(trained: TrainedRun, source: str) -> dict[str, float]:
    """The scale of the input of each layer that can store one, by our names (`activations.scale_of_amax`).

    `source` is a source of text, as of a run, or `RECORDED`.
    """
    layers = layers_with_scales(trained.model)
    if not layers:
        raise UserError(
            "no layer of this run has activations whose scale is stored (NVFP4, or FP8 with one scale), so "
            "there is nothing to calibrate; leave --calibrate out"
        )
    scales = {name: activations.recorded_scale(layer) for name, layer in layers.items()}
    if source != RECORDED:
        scales = _measured(trained, source, layers)
    missing = [name for name, scale in scales.items() if scale is None]
    if missing and source == RECORDED:
        raise UserError(
            f"the recipe remembers no amax of the input of {missing[0]!r}: it has neither delayed scales nor "
            "a held amax there; name a text with --calibrate"
        )
    if missing:
        raise UserError(
            f"no token of {source} reached {missing[0]!r}, so its input has no scale; calibrate with "
            "a longer text"
        )
    return {name: scale for name, scale in scales.items() if scale is not None}


def layers_with_scales(model: torch.nn.Module) -> dict[str, Linear]:
    """The layers whose input can have a stored scale."""
    layers = narrow_layers(model)
    return {n: layer for n, layer in layers.items() if activations.needs_scale(layer.spec.casts["fprop.x"])}


def _measured(trained: TrainedRun, source: str, layers: dict[str, Linear]) -> dict[str, float | None]:
    dataset, length = run_data(trained, source), trained.config.data.sequence_length
    with input_amaxes(layers) as amaxes, torch.no_grad():
        for number, window in enumerate(validation_batches(dataset.train, 1, length, sequences=SEQUENCES)):
            trained.go_to_sample(number)
            trained.model(window.x_BT)
    broken = [name for name, amax in amaxes.items() if not amax < float("inf")]
    if broken:
        raise UserError(
            f"the input of {broken[0]!r} is not finite on {source}, so it has no scale; calibrate with "
            "another text, or export an earlier checkpoint"
        )
    casts = {name: layer.spec.casts["fprop.x"] for name, layer in layers.items()}
    scale_of = activations.scale_of_amax
    return {name: scale_of(cast, amaxes[name]) if amaxes.get(name) else None for name, cast in casts.items()}


@contextmanager
def input_amaxes(layers: dict[str, Linear]) -> Iterator[dict[str, float]]:
    """The largest magnitude of the inputs of layers, in what runs meanwhile."""
    found: dict[str, float] = {}

    def see(name: str, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].numel():
            amax = float(inputs[0].abs().max())
            found[name] = amax if amax != amax else max(found.get(name, 0.0), amax)

    handles = [layer.register_forward_pre_hook(partial(see, name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def differences_from_run(folder: Path, source: TrainedRun, to: str) -> list[read_back.Difference]:
    """The tensors of an export that are not those of its run, in whichever dtype its plain weights are."""
    has_scales = to in QUANTIZED and read_back.has_input_scales(folder)
    scales = dict.fromkeys(layers_with_scales(source.model), 1.0) if has_scales else {}
    found: list[list[read_back.Difference]] = []
    for dtype in (None, *DTYPES):
        with TemporaryDirectory() as temporary:
            write_export(Path(temporary), source, to, dtype, scales)
            found.append(read_back.different_tensors(folder, Path(temporary)))
        if not found[-1]:
            break
    fewest = min(found, key=len)
    for difference in fewest:
        if difference.is_of_form:
            raise UserError(f"{folder} is not an export of {source.path}: {difference}; export it again")
    return fewest


def format_of(folder: Path) -> str:
    """The format of an export of `hf`, `gguf` or `QUANTIZED`."""
    if (folder / GGUF_FILE).is_file():
        return "gguf"
    quantization = read_json(inside(folder, CONFIG)).get("quantization_config") or {}
    return str(quantization.get("quant_method", "hf"))


def import_model(path: Path, out: Path, tokenizer: Path | None = None, source: str = "stdlib") -> Path:
    """Make a run directory at step 0 from a model of another program; its recipe is fp32, so the weights are
    unchanged. Returns the directory.

    Args:
        path: a Hugging Face folder, a folder that `export` made, or a file of llm.c or GGUF.
        out: the new run directory, which must not exist.
        tokenizer: a tokenizer.json, or a folder with one; None for the model's tokenizer, if it has one.
        source: the default text for evaluation.
    """
    model = read_external_model(path)
    config = imported_config(model, source)
    chosen = tokenizer or model.tokenizer
    loaded = None if chosen is None else load_tokenizer(chosen)
    if loaded is not None and loaded.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer {chosen} has {loaded.vocab_size} ids, and the model {path} only "
            f"{model.config.vocab_size}; name the model's own with --tokenizer"
        )
    with staged_directory(out) as folder:
        directory = RunDirectory(folder)
        directory.claim(config)
        if loaded is not None:
            loaded.save(directory.tokenizer)
        is_own = chosen == model.tokenizer
        kept = {name: v for name, v in model.special_tokens.items() if is_own or name != TOKENIZER_CONFIG}
        directory.keep_special_tokens(kept)
        save(directory.checkpoints, 0, {"model": model.tensors}, {}, config.checkpoint.keep, "imported")
        facts = {"from": str(path), "kind": model.format, "precision": " and ".join(sorted(model.precisions))}
        directory.record({"event": "import", "step": 0, **facts})
        directory.set_status("done", f"imported from {path}")
    return out
