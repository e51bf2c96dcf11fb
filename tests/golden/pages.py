"""The tables of docs/recipes.md and docs/serving.md that follow from recipes and from the keys of casts.

They list recipes, keys, the recipes that can be written for another tool, and what exports make of each. For
the last, a model of each recipe is exported in earnest: the files are read back and compared with what the
model multiplies, so a cell is an export that holds the weights exactly, with or without a sentence on the
rest, or a refusal.
"""

import inspect
import re
import tempfile
from pathlib import Path

import torch

from narrowgauge.exchange import TARGETS, refusals
from narrowgauge.quantization.keys import KEYS, Keys
from narrowgauge.recipes import choose_backend, differs, named_device, recipe, recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import bytes_tokenizer
from narrowgauge.trainer.runs.use.export import export_model
from narrowgauge.trainer.runs.use.trained_model import TrainedRun
from narrowgauge.trainer.training.config.config import make_config
from narrowgauge.trainer.training.step.build_model import build_model, go_to

DOCS, END = Path(__file__).parents[2] / "docs", "<!-- end -->"
COLUMNS = {
    "compressed-tensors": ("compressed-tensors", False),
    "with scales": ("compressed-tensors", True),
    "modelopt": ("modelopt", False),
    "with scales ": ("modelopt", True),
    "gguf": ("gguf", False),
}
SIZES = {"dim": 128, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_dim": 128, "vocab_size": 320}
TEXT = "All that is exported is read back. " * 600  # enough for a training and a held-out part
RECIPES = [name for tool in ("", "modelopt", "nemo-rl") for name in recipe_names(tool)]


def outcomes(name: str, folder: Path) -> list[tuple[str, list[str]]]:
    """For each column "exact", "differs" or "refused", with the sentences."""
    text, tokenizer = folder / "text.txt", folder / "tokenizer.json"
    text.write_text(TEXT, encoding="utf-8")
    bytes_tokenizer().save(tokenizer)
    values = {
        "model": {"name": "debug", **SIZES, "experts": 2 if "experts" in name else 0},
        "data": {"source": str(text), "tokenizer": "bytes", "sequence_length": 256},
        "training": {"batch_size": 1, "micro_batch_size": 1},
        "recipe": {"name": name},
    }
    config = make_config(values)
    model = build_model(config.spec, torch.device("cpu"))
    go_to(model, config, 0, 0)
    source = TrainedRun(folder, config, model.eval(), 0, tokenizer)
    found = []
    for number, (to, scales) in enumerate(COLUMNS.values()):
        try:
            out = folder / str(number)
            remarks = export_model(source, to, out, calibrate=str(text) if scales else None)
            found.append(("differs" if remarks else "exact", remarks))
        except UserError as error:
            found.append(("refused", [str(error)]))
    return found


#: What the sentences of exports have in common, for a table of all.
KINDS = {
    r".*does not quantize weights.*": "the recipe does not quantize weights",
    r".*GGUF holds their values.*": "weights are stored as values, exactly, and not as codes",
    r"inputs were .*llama\.cpp rounds.*": "llama.cpp rounds inputs by its own rule, to int8 or BF16",
    r".*compressed-tensors cannot express.*": "the layout cannot express the weights",
    r".*ModelOpt's layout is written for.*": "ModelOpt has no algorithm with these weights and inputs",
    r".*Hadamard transform.*": "weights are multiplied after a Hadamard transform",
    r"inputs of .*layout cannot express.*": "inputs are not quantized: the layout cannot express them",
    r"inputs of .*without a scale.*": "inputs are not quantized without a scale",
    r"inputs of .*?: (.*) in training, and (.*) in the server; and one fixed.*": (
        r"inputs: \1 in training, \2 in the server, and one fixed scale"
    ),
    r"inputs of .*?: (.*) in training, and (.*) in the server": r"inputs: \1 in training, \2 in the server",
    r"inputs of .*one fixed scale.*": "inputs have one fixed scale, in training that of each batch",
}


def exported() -> str:
    """A Markdown row for the recipes with the same outcomes, and the sentences that letters stand for."""
    letters: dict[str, str] = {}
    head = " | ".join(name.strip() for name in COLUMNS)
    rows: dict[str, list[str]] = {}  # the recipes of each row of cells
    for name in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            cells = [_cell(kind, sentences, letters) for kind, sentences in outcomes(name, Path(folder))]
        rows.setdefault(" | ".join(cells), []).append(f"`{name}`")
    lines = [f"| recipes | {head} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()]
    return "\n".join([*lines, "", *(f"- {key}: {sentence}" for sentence, key in letters.items())])


def _cell(kind: str, sentences: list[str], letters: dict[str, str]) -> str:
    if kind == "exact" or "nothing to calibrate" in sentences[0]:
        return "exact" if kind == "exact" else "-"
    kinds = dict.fromkeys(_kind(sentence) for sentence in sentences)
    names = " ".join(letters.setdefault(k, chr(97 + len(letters))) for k in kinds)
    return f"refused: {names}" if kind == "refused" else names


def _kind(sentence: str) -> str:
    """A sentence without the names of layers and casts."""
    pattern = next((p for p in KINDS if re.fullmatch(p, sentence)), None)
    return sentence if pattern is None else re.sub(pattern, KINDS[pattern], sentence, count=1)


def written() -> str:
    """A Markdown row for each target: its version, and the recipes that it can express."""
    lines = ["| `--to` | version | recipes |", "| --- | --- | --- |"]
    for name, target in TARGETS.items():
        names = [*recipe_names(), *recipe_names("modelopt")]
        found = ", ".join(f"`{r}`" for r in names if not refusals(recipe(r), name))
        lines.append(f"| `{name}` | {target.VERSION.partition(' (')[0]} | {found} |")
    return "\n".join(lines)


KIND_WORDS = {
    **{str: "a name", bool: "`true`, `false`", int: "a whole number", int | float: "a number"},
    **{list | tuple: "a list", str | list | tuple: '`"random"`, a list'},
    str | int | list | tuple: '`"tensor"`, `"row"`, n, `[rows, columns]`',
}
DEVICES = ("t4", "a100", "rtx4090", "h100", "b200", "mi300x", "mi355x")


def shipped() -> str:
    """A Markdown row for each recipe: what it is, and the devices that multiply its codes."""
    devices = {name: named_device(name) for name in DEVICES}
    lines = ["| recipe | what it is | native on |", "| --- | --- | --- |"]
    for one in map(recipe, recipe_names()):
        on = [name for name, device in devices.items() if choose_backend(one, device).name == "native"]
        lines.append(f"| `{one.name}` | {one.title} | {', '.join(on) or 'none of these'} |")
    return "\n".join(lines)


def differences() -> str:
    """An item for each way in which shipped recipes differ from their sources, and their names."""
    names: dict[str, list[str]] = {}
    for name in recipe_names():
        names.setdefault(differs(name), []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(of)}: {sentence}." for sentence, of in names.items() if sentence)


def keys() -> str:
    """A Markdown row for each key of a recipe's table: its values, and its comment in the source."""
    source = inspect.getsource(Keys)
    comments = re.findall(r"((?:^    #: .*\n)+)    (\w+): ", source, re.MULTILINE)
    lines = ["| key | values | meaning |", "| --- | --- | --- |"]
    for comment, name in comments:
        declared, meaning = KEYS[name], " ".join(re.findall(r"#: (.*)", comment))
        values = [f'`"{value}"`' for value in declared.among if value]
        if declared.kind != ():
            lines.append(f"| `{name}` | {', '.join(values) or KIND_WORDS[declared.kind]} | {meaning} |")
    return "\n".join(lines)


#: The page of each table.
TABLES = {
    **{table.__name__: (DOCS / "recipes.md", table) for table in (shipped, keys, written, differences)},
    "exports": (DOCS / "serving.md", exported),
}


def text(name: str) -> str:
    """The page of a table with the table made again."""
    page, table = TABLES[name]
    begin = f"<!-- table: {name} -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    return f"{before}{begin}\n{table()}\n\n{END}{rest.partition(END)[2]}"
