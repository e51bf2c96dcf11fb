"""`recipes`, `formats` and `models`: print tables, or the facts of one entry."""

import argparse
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from narrowgauge.cli.installed import require_torch
from narrowgauge.errors import UserError
from narrowgauge.exchange import read_recipe, write_recipe
from narrowgauge.formats import format, format_names
from narrowgauge.models import count_parameters, model_config, model_names
from narrowgauge.quantization.passes.implementations import Implementation
from narrowgauge.recipes import (
    Device,
    Recipe,
    choose_backend,
    device_facts,
    load_recipe,
    named_device,
    products_on,
    recipe,
    recipe_names,
)
from narrowgauge.recipes.describe import differences
from narrowgauge.toml_text import toml_value
from narrowgauge.units import human_count


def run_recipes(options: argparse.Namespace) -> None:
    """Print the table of recipes with their backends on a device, or one recipe: its TOML, its places."""
    name = options.name
    if options.blocks is not None and options.blocks < 1:
        raise UserError(f"--blocks {options.blocks}, but a model has at least one block; name their number")
    if options.source is not None:
        if name is None:
            raise UserError("--from reads a file of another tool, and none is named; write its path")
        chosen: Recipe | None = read_recipe(name, options.source, options.blocks)
    else:
        chosen = None if name is None else _recipe(name)
    if options.diff is not None or options.to is not None:
        _print_beside(chosen, options)
        return
    if chosen is not None and options.device is None:
        print(chosen.text.rstrip())
        return
    console = Console()
    if options.device is None:
        require_torch()
        import torch

        device = device_facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        device = named_device(options.device)
        is_nvidia = device.maker == "nvidia"
        library = f", with CUDA {device.library[0]}.{device.library[1]}" if is_nvidia else ""
        _say(console, f"{options.device}: {device}{library}")
    if chosen is None:
        _print_recipes(console, device, "here" if options.device is None else options.device)
    else:
        _print_places(console, chosen, device)


def _recipe(name: str) -> Recipe:
    return load_recipe(name) if name.endswith(".toml") else recipe(name)


def _print_beside(chosen: Recipe | None, options: argparse.Namespace) -> None:
    """Print a recipe compared with another one, or in the form of another tool."""
    if chosen is None:
        option = "to" if options.diff is None else "diff"
        raise UserError(f"--{option} is about one recipe, and none is named; write its name before it")
    if options.diff is not None:
        _print_differences(Console(), chosen, _recipe(options.diff))
    else:
        given = [options.name, *([] if options.source is None else ["--from", options.source])]
        print(write_recipe(chosen, options.to, options.blocks, given), end="")


def _print_differences(console: Console, a: Recipe, b: Recipe) -> None:
    """Print the keys in which two recipes differ, with both values."""
    rows = differences(a, b)
    if not rows:
        _say(console, f"{a.name} and {b.name} are equal in every place")
        return
    table = Table("where they differ", a.name, b.name, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)


def _print_recipes(console: Console, device: Device, where: str) -> None:
    """Print which recipes are native on a device, and the reason of each verdict."""
    table = Table("recipe", where, "what it is", box=None, header_style="bold")
    reasons: dict[str, list[str]] = {}
    for name in recipe_names():
        r = recipe(name)
        backend = choose_backend(r, device)
        table.add_row(name, backend.name, r.title)
        if r.is_narrow or backend.name == "emulated":
            reasons.setdefault(f"{backend.name}: {backend.reason}", []).append(name)
    console.print(table)
    for tool, whose in (
        ("modelopt", "ModelOpt's files, for the forward pass"),
        ("nemo-rl", "NeMo-RL's files, for mixtures of experts"),
    ):
        _say(console, f"of {whose}: {', '.join(recipe_names(tool))}")
    for reason, names in reasons.items():
        _say(console, reason if len(reasons) == 1 else f"{', '.join(names)} {reason}")


def _print_places(console: Console, chosen: Recipe, device: Device) -> None:
    """Print how a device computes each GEMM of a recipe, each cast, and the recipe as a whole."""
    table = Table("places", "casts", "there", "why", box=None, header_style="bold")
    gemms: list[str] = []
    made: dict[tuple[str, Implementation], list[str]] = {}
    for product in products_on(chosen, device):
        places = ", ".join(product.places)
        where = f"{places} (by a rule)" if product.gemm in gemms else places
        gemms.append(product.gemm)
        a, b = product.operands
        why = product.obstacle.removeprefix(f"{product.gemm} ").removeprefix("attention ").partition(";")[0]
        why = why or product.scheme or f"a plain matmul of {a.name}"
        table.add_row(where, f"{a.name}, {b.name}", "emulated" if product.obstacle else "native", why)
        for place, cast, code in zip(product.places, product.operands, product.made_by or (), strict=False):
            if cast.is_scaled and place not in (known := made.setdefault((cast.name, code), [])):
                known.append(place)
    console.print(table)
    if made:
        operands = Table("cast", "made by", "places", "why not faster", box=None, header_style="bold")
        for (cast_name, code), of in made.items():
            operands.add_row(cast_name, code.name, ", ".join(of), code.gap)
        console.print(operands)
    backend = choose_backend(chosen, device)
    _say(console, f"recipe {chosen.name} as a whole is {backend.name}: {backend.reason}")


def _say(console: Console, text: str) -> None:
    console.print(text, style="dim", markup=False, highlight=False)


def run_formats(options: argparse.Namespace) -> None:
    """Print the table of formats, or the facts of one."""
    names = [options.name] if options.name else format_names()
    table = Table(box=None, header_style="bold")
    table.add_column("format")
    for column in ("bits", "E.M", "bias", "max", "smallest normal", "smallest"):
        table.add_column(column, justify="right")
    for name in names:
        f = format(name)
        limits = (f.max, f.smallest_normal, f.smallest_subnormal)
        layout = f"{f.exponent_bits}.{f.mantissa_bits}"
        table.add_row(name, str(f.bits), layout, str(f.bias), *(f"{x:.6g}" for x in limits))
    Console().print(table)
    if options.name:
        print(f"not finite: {format(options.name).specials.value}")
        print(f"source: {format(options.name).source}")
    else:
        print("E.M: bits of exponent and mantissa")


def run_models(options: argparse.Namespace) -> None:
    """Print the table of named sizes, or the dimensions of one as the [model] of a configuration."""
    if options.name:
        model = model_config(options.name)
        print(f"[model]\nname = {toml_value(options.name)}")
        for key, value in asdict(model).items():
            print(f"{key} = {toml_value(value)}")
        active = f" ({count_parameters(model, active=True):,} active)" if model.experts else ""
        print(f"# {count_parameters(model):,} parameters{active}")
        return
    table = Table(box=None, header_style="bold")
    table.add_column("model", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for column in ("layers", "dim", "heads", "kv", "ffn", "vocab", "longest"):
        table.add_column(column, justify="right")
    for name in model_names():
        m = model_config(name)
        sizes = (m.layers, m.dim, m.heads, m.kv_heads, m.ffn_dim, m.vocab_size, m.max_sequence_length)
        table.add_row(name, human_count(count_parameters(m)), *(f"{size:,}" for size in sizes))
    Console().print(table)
    print("size: parameters; kv: key-value heads; longest: tokens of a sequence")
    print("'narrowgauge models NAME' prints one as TOML")
