"""`recipes`, `formats` and `models` print tables, or the facts of one entry; `predict` forecasts a recipe."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from narrowgauge import recipes as all_recipes  # each name is imported when it is used
from narrowgauge.exchange import SOURCES, TARGETS
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.laboratory.arguments import Amount, Count, File, Form, Names

if TYPE_CHECKING:
    from narrowgauge.recipes import Device, Recipe

_FROM = "NAME is a file of that tool: print its recipe, or pass it on to --to or --diff"
Name = Annotated[str | None, Form("NAME", is_positional=True), "the one to describe (list all)"]


def recipes(
    name: Annotated[Name, "a shipped recipe or a .toml file"] = None,
    *,
    device: Annotated[str | None, Form("D")] = None,
    diff: Annotated[str | None, Form("OTHER"), "with NAME: show the differences from another recipe"] = None,
    to: Annotated[str | None, Form("|".join(TARGETS)), "with NAME: write the recipe for another tool"] = None,
    from_: Annotated[str | None, Form("|".join(SOURCES)), _FROM] = None,
    blocks: Annotated[Count | None, "megatron: number of blocks of the model"] = None,
) -> None:
    """List the shipped recipes, or print one; with --device, what is native on another device.

    narrowgauge recipes nvfp4 --diff mxfp4

    Args:
        device: Show what is native on another device: sm_89, gfx942, rtx4090, mi250x, cpu ...; with NAME,
            place by place.
    """
    if name is None:
        if from_ is not None:
            raise UserError("--from reads a file of another tool, and none is named; write its path")
        if option := "diff" if diff is not None else "to" if to is not None else "":
            raise UserError(f"--{option} is about one recipe, and none is named; write its name before it")
        _print_recipes(_device(device), device or "here")
        return
    from narrowgauge.exchange import read_recipe, write_recipe

    chosen = all_recipes.recipe(name) if from_ is None else read_recipe(name, from_, blocks)
    if diff is not None:
        from narrowgauge.recipes.describe import differences

        other = all_recipes.recipe(diff)
        if rows := differences(chosen, other):
            _print_table(("where they differ", chosen.name, other.name), rows)
        else:
            _say(f"{chosen.name} and {other.name} are equal in every place")
    elif to is not None:
        given = [name, *([] if from_ is None else ["--from", from_])]
        print(write_recipe(chosen, to, blocks, given), end="")
    elif device is not None:
        _print_places(chosen, _device(device))
    else:
        print(chosen.text.rstrip() + all_recipes.comment(name))


def _device(name: str | None) -> "Device":
    """A named device, whose facts are printed, or the device of this machine."""
    if name is None:
        from narrowgauge.trainer.cli.main import require_torch

        require_torch()
        import torch

        return all_recipes.device_facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    device = all_recipes.named_device(name)
    is_nvidia = device.maker == "nvidia"
    library = f", with CUDA {device.library[0]}.{device.library[1]}" if is_nvidia else ""
    _say(f"{name}: {device}{library}")
    return device


def _print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print rows of text under their heads; the columns of `right` are numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for head in heads:
        table.add_column(
            head, justify="right" if head in right else "left", no_wrap=head in ("model", "size")
        )
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _say(text: str) -> None:
    from rich.console import Console

    Console().print(text, style="dim", markup=False, highlight=False)


def _print_recipes(device: "Device", where: str) -> None:
    """Print which recipes are native on a device, and the reason of each verdict."""
    rows, reasons = [], dict[str, list[str]]()
    for name in all_recipes.recipe_names():
        r = all_recipes.recipe(name)
        backend = all_recipes.choose_backend(r, device)
        rows.append((name, backend.name, r.title))
        if r.is_narrow or backend.name == "emulated":
            reasons.setdefault(f"{backend.name}: {backend.reason}", []).append(name)
    _print_table(("recipe", where, "what it is"), rows)
    for tool, whose in (
        ("modelopt", "ModelOpt's files, for the forward pass"),
        ("nemo-rl", "NeMo-RL's files, for mixtures of experts"),
    ):
        _say(f"of {whose}: {', '.join(all_recipes.recipe_names(tool))}")
    for reason, names in reasons.items():
        _say(reason if len(reasons) == 1 else f"{', '.join(names)} {reason}")


def _print_places(chosen: "Recipe", device: "Device") -> None:
    """Print how a device computes each GEMM of a recipe, each cast, and the recipe as a whole."""
    gemms, rows, made = list[str](), [], dict[tuple[str, str, str], dict[str, None]]()
    for product in all_recipes.products_on(chosen, device):
        places = ", ".join(product.places)
        where = f"{places} (by a rule)" if product.gemm in gemms else places
        gemms.append(product.gemm)
        a, b = product.operands
        why = product.obstacle.removeprefix(f"{product.gemm} ").removeprefix("attention ").partition(";")[0]
        why = why or product.scheme or f"a plain matmul of {a.name}"
        rows.append((where, f"{a.name}, {b.name}", "emulated" if product.obstacle else "native", why))
        for place, cast, code in zip(product.places, product.operands, product.made_by or (), strict=False):
            if cast.is_scaled:  # and once: attention's places are those of several products
                made.setdefault((cast.name, code.name, code.gap), {})[place] = None
    _print_table(("places", "casts", "there", "why"), rows)
    if made:
        casts = [(cast, code, ", ".join(of), gap) for (cast, code, gap), of in made.items()]
        _print_table(("cast", "made by", "places", "why not faster"), casts)
    backend = all_recipes.choose_backend(chosen, device)
    _say(f"recipe {chosen.name} as a whole is {backend.name}: {backend.reason}")


def formats(name: Name = None) -> None:
    """List the number formats, or describe one.

    narrowgauge formats e4m3
    """
    from narrowgauge.formats import format, format_names

    columns = ("bits", "E.M", "bias", "max", "smallest normal", "smallest")
    rows = []
    for f in map(format, [name] if name else format_names()):
        limits = (f"{x:.6g}" for x in (f.max, f.smallest_normal, f.smallest_subnormal))
        rows.append((f.name, str(f.bits), f"{f.exponent_bits}.{f.mantissa_bits}", str(f.bias), *limits))
    _print_table(("format", *columns), rows, right=columns)
    if name:
        print(f"not finite: {format(name).specials.value}")
        print(f"source: {format(name).source}")
    else:
        print("E.M: bits of exponent and mantissa")


def models(name: Name = None) -> None:
    """List the named models with their parameters.

    narrowgauge models llama3-8b
    """
    from narrowgauge.system.toml_text import toml_value
    from narrowgauge.system.units import human_count
    from narrowgauge.trainer.models import count_parameters, model_config, model_names

    if name:
        model = model_config(name)
        print(f"[model]\nname = {toml_value(name)}")
        for key, value in asdict(model).items():
            print(f"{key} = {toml_value(value)}")
        active = f" ({count_parameters(model, active=True):,} active)" if model.experts else ""
        print(f"# {count_parameters(model):,} parameters{active}")
        return
    columns = ("size", "layers", "dim", "heads", "kv", "ffn", "vocab", "longest")
    rows = []
    for one in model_names():
        m = model_config(one)
        sizes = (m.layers, m.dim, m.heads, m.kv_heads, m.ffn_dim, m.vocab_size, m.max_sequence_length)
        rows.append((one, human_count(count_parameters(m)), *(f"{size:,}" for size in sizes)))
    _print_table(("model", *columns), rows, right=columns)
    print("size: parameters; kv: key-value heads; longest: tokens of a sequence")
    print("'narrowgauge models NAME' prints one as TOML")


def predict(
    *,
    recipe: Annotated[Names, Form("R,..."), "recipes, schemes of the atlas, .toml files"],
    params: Annotated[Amount | None, "parameters without embeddings, as in 1.9B"] = None,
    model: Annotated[str | None, Form("NAME")] = None,
    tokens: Annotated[Amount, Form("D"), "training tokens, as in 38e9 or 38B"],
    runs: Annotated[tuple[Path, ...] | None, Form("DIR")] = None,
    probe: File | None = None,
    atlas: Annotated[File | None, "other points than those that ship (docs/forecast.md)"] = None,
    explain: Annotated[bool, "the points behind it, and what published laws say"] = False,
    out: Annotated[File | None, "write a picture (.svg), .json, .csv or .txt"] = None,
    json: Annotated[bool, "print JSON"] = False,
) -> int:
    """Forecast a recipe's loss gap at a size and length, from published runs.

    narrowgauge predict --recipe mxfp8,nvfp4 --params 8e9 --tokens 1T

    Args:
        model: A named model in place of --params (narrowgauge models).
        runs: Your own: a folder of compare, or run directories with the reference first.
        probe: What probe --json printed, of the recipe and of one with points, such as nvfp4.
    """
    from json import dumps

    from rich.console import Console

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of small matrices, before numpy is imported
    from narrowgauge.trainer.experiment.forecast import predict as forecast

    found = forecast(recipe, params, tokens, atlas, model=model, runs=runs, probe=probe)
    if out is not None:
        found.save(out)
    if json:
        print(dumps(found.as_json(), indent=1))
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(found.table())
        if explain:
            console.print("\n" + found.explain())
        if out is not None:
            console.print(f"written: {out}")
    return 1 if all(one.refused for one in found) else 0
