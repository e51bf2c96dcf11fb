"""`recipes` and `formats`: tables of what exists, or the facts of one."""

import argparse

import torch
from rich.console import Console
from rich.table import Table

from narrowgauge.formats import format, format_names
from narrowgauge.recipes import choose_backend, device_facts, recipe, recipe_names


def add_options(p: argparse.ArgumentParser) -> None:
    """Add the options of both verbs."""
    p.add_argument("name", metavar="NAME", nargs="?")


def run_recipes(options: argparse.Namespace) -> None:
    """Print the table of recipes with their backends on this device, or one recipe's TOML."""
    if options.name:
        print(recipe(options.name).text.rstrip())
        return
    device = device_facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    table = Table("recipe", "here", "what it is", box=None, header_style="bold")
    reasons: dict[str, list[str]] = {}
    for name in recipe_names():
        r = recipe(name)
        backend = choose_backend(r, device)
        table.add_row(name, backend.name, r.title)
        if r.is_narrow:
            reasons.setdefault(f"{backend.name}: {backend.reason}", []).append(name)
    console = Console()
    console.print(table)
    for reason, names in reasons.items():
        text = reason if len(reasons) == 1 else f"{', '.join(names)} {reason}"
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
