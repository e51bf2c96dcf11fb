"""The tables of docs/recipes.md: the casts of each recipe, and the keys that other tools lack."""

import re
from collections.abc import Iterable, Mapping, Sequence

from narrowgauge.recipes.describe import NONE, WORDS, recipe_facts
from narrowgauge.recipes.exporting import TARGETS, Refusal, refusals
from narrowgauge.recipes.places import GEMM_PLACES
from narrowgauge.recipes.registry import recipe, recipe_names

# What stands for a source, and where that is.
_OWNERS = {
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "MS-AMP": "Azure/MS-AMP",
    "torchao": "pytorch/ao",
}
_ADDRESSES = {
    "OCP Microscaling Formats 1.0": "https://www.opencompute.org/documents/"
    "ocp-microscaling-formats-mx-v1-0-spec-final-pdf",
}
_ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")
_FILE_AT = re.compile(r"\b([\w.-]+/[\w.-]+|TransformerEngine|MS-AMP|torchao) @ ([0-9a-f]{7,40})\b")


def places_table() -> list[str]:
    """The Markdown table recipe x place: the six operands, and what else differs from a recipe's defaults."""
    plain = recipe_facts(recipe("fp32"))
    rows = []
    for name in recipe_names():
        facts = recipe_facts(recipe(name))
        operands = [_cell(facts[place]) for place in GEMM_PLACES]
        others = [
            f"{key} = {_cell(said)}"
            for key, said in facts.items()
            if key not in (*GEMM_PLACES, *WORDS, "keep", "compute") and said != plain.get(key, NONE)
        ]
        keep = [f"wide: {facts['keep']}"] if "keep" in facts else []
        compute = [] if facts["compute"] == "bf16" else [f"compute = {facts['compute']}"]
        rows.append(
            [f"`{name}`", *operands, "; ".join([*compute, *others, *keep]), linked(recipe(name).source)]
        )
    places = [f"`{place}`" for place in GEMM_PLACES]
    return _markdown(["recipe", *places, "other places, and layers that stay wide", "source"], rows)


def _cell(cast: str) -> str:
    """A cast in few words: long numbers are cut."""
    return re.sub(r"\d+\.\d{4,}", lambda m: f"{float(m[0]):.4g}", cast)


def linked(source: str) -> str:
    """The source of a recipe with links."""
    made = _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", source)
    made = _FILE_AT.sub(
        lambda m: f"[{m[1]} @ {m[2][:7]}](https://github.com/{_OWNERS.get(m[1], m[1])}/tree/{m[2]})", made
    )
    for words, address in _ADDRESSES.items():
        made = made.replace(words, f"[{words}]({address})")
    for words, owner in _OWNERS.items():
        made = re.sub(
            rf"(?<![\w/\[]){words}(?! @)\b(?![^\[]*\])", f"[{words}](https://github.com/{owner})", made
        )
    return made


def refusals_table() -> list[str]:
    """The Markdown table recipe x target: "written", or the keys that the target lacks."""
    rows = []
    for name in recipe_names():
        cells = [refused_keys(refusals(recipe(name), target)) for target in TARGETS]
        rows.append([f"`{name}`", *cells])
    heads = [f"`{target}`: {TARGETS[target].version.partition(' (')[0]}" for target in TARGETS]
    return _markdown(["recipe", *heads], rows)


def refused_keys(found: Iterable[Refusal]) -> str:
    """The keys of refusals; `narrowgauge recipes NAME --to TARGET` prints their places."""
    keys = list(dict.fromkeys(r.key for r in found))
    if "compute" in keys:
        return "nothing to quantize"
    return ", ".join(f"`{key}`" for key in keys) or "**written**"


def generated(page: str, tables: Mapping[str, Sequence[str]]) -> str:
    """A page with its tables made anew, which stand between `<!-- table: NAME -->` and `<!-- end -->`."""
    for name, lines in tables.items():
        start, end = f"<!-- table: {name} -->", "<!-- end -->"
        before, found, rest = page.partition(start)
        assert found, f"the page has no {start}"
        page = "\n".join([before + start, "", *lines, "", end + rest.partition(end)[2]])
    return page


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(heads), ["---"] * len(heads), *map(list, rows)]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
