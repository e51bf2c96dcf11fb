"""What pages show of plans is what their commands print, under any version of torch (`make pages`).

A row of a table is a template; the names in braces are figures of the plan (`figures`). This file as a
program writes the rows of the pages that are named, or of all.
"""

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.system.units import human_bytes, human_duration
from narrowgauge.trainer.cli.main import main as narrowgauge
from narrowgauge.trainer.cluster.plan.plan_text import _figure
from support.markdown import blocks

CARD, GPT3, FRONTIER = (
    f"how-to/{name}.md" for name in ("fp8-on-a-4090", "gpt3-from-wikipedia", "llama3-on-frontier")
)
AT_24 = "--memory-limit 23GiB --data.sequence_length 1024"
OFFLOAD = "--recipe.offload master,grad,m,v"
AGAIN = "--training.recompute true"


@dataclass(frozen=True)
class Row:
    """A line of a page, and the options of `plan` that make its figures."""

    page: str
    template: str
    options: str

    def text(self) -> str:
        """The line with its figures."""
        options = self.options.split()
        return self.template.format(**figures(["plan", *options, "--json"]))


def figures(words: list[str]) -> dict[str, str]:
    """The figures of a plan, as pages show them."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert not narrowgauge(words), words
    plan: dict[str, Any] = json.loads(said.getvalue())
    memory = plan["memory"]
    gib = {name.replace(" ", "_"): f"{size / 2**30:.1f}" for name, size in memory["bytes"].items()}
    activations = memory["bytes"]["saved activations"] + memory["bytes"]["logits"]
    found = gib | {
        "activations": f"{activations / 2**30:.1f}",
        "state": human_bytes(sum(memory["bytes"][n] for n in ("weights", "master", "gradients", "m", "v"))),
        "device": human_bytes(memory["peak"]) + ("" if memory["fits"] else ": does not fit"),
        "host": human_bytes(sum(memory["host_bytes"].values())),
    }
    for column, time in (("best", plan.get("step")), ("expect", plan.get("expect"))):
        if time is None:
            continue
        cost = plan["run"] if column == "best" else time
        found |= {
            f"{column}_step": f"{_figure(time['seconds'])} s",
            f"{column}_speed": f"{plan['step']['tokens'] / time['seconds']:,.0f}",
            f"{column}_time": human_duration(86_400 * cost["days"]),
            f"{column}_price": f"{cost['price']:,.2f} {plan['run'].get('currency', '')}",
            f"{column}_hours": f"{cost['device-hours']:,.0f}",
            f"{column}_node_hours": f"{cost['device-hours'] / 8:,.0f}",
        }
    if "step" in plan:
        found["casts_step"] = f"{_figure(plan['step']['casts'])} s"
    return found


def fitting(model: str, micro: int, recipe: str, more: str = "") -> Row:
    """A row of the table of what fits on a card of 24 GB."""
    again, host = ("yes" if AGAIN in more else "no"), ("master, grad, m, v" if OFFLOAD in more else "nothing")
    template = f"| `{model}` | {micro} x 1024 | `{recipe}` | {again} | {host} | {{device}} |"
    options = f"--model {model} --recipe {recipe} --training.micro_batch_size {micro} {AT_24} {more}"
    return Row(CARD, template, options.strip())


EIGHT = f"--model llama3-8b --recipe msamp-o3 --training.micro_batch_size 1 {AGAIN} {OFFLOAD}"
EIGHT += " --data.sequence_length 2048"
TOKENS = "--cluster rtx4090 --data.sequence_length 1024 --training.batch_size 512"
GUIDE = "--model llama3-8b --data.sequence_length 8192 --recipe bf16 --cluster frontier --tokens 1T "
GUIDE += "--training.batch_size 2048 --training.micro_batch_size 1 --training.chunked_loss true"
ROWS = [
    fitting("gpt2-124m", 8, "fp8"),
    fitting("gpt3-345m", 8, "fp8"),
    fitting("gpt3-345m", 8, "msamp-o2"),
    fitting("gpt2-1558m", 2, "fp8", AGAIN),
    fitting("gpt2-1558m", 2, "fp8", f"{AGAIN} {OFFLOAD}"),
    fitting("gpt2-1558m", 2, "msamp-o2", AGAIN),
    Row(
        CARD,
        "| `llama3-8b` | 1 x 2048 | `msamp-o3` | yes | master, grad, m, v ({host}) | {device} |",
        f"{EIGHT} --memory-limit 23GiB",
    ),
    Row(
        CARD,
        "| `gpt2-124m`, 10.5 billion tokens | `fp8` | {best_speed} ({best_time}) | {expect_speed} "
        "({expect_time}, {expect_price} at 0.31 USD an hour) |",
        f"{TOKENS} --model gpt2-124m --recipe fp8 --training.micro_batch_size 8 --steps 20000",
    ),
    Row(
        CARD,
        "| `llama3-8b`, 500 steps of 64 x 2048 tokens | `msamp-o3` | {best_speed} ({best_time}) | "
        "{expect_speed} ({expect_time}, {expect_price}) |",
        f"{EIGHT} --cluster rtx4090 --training.batch_size 64 --steps 500",
    ),
    *(
        Row(
            CARD,
            f"| `{recipe}`{', emulated' if recipe == 'nvfp4' else ''} | {{best_step}} | {{casts_step}} | "
            "{expect_step} |",
            f"{TOKENS} --model qwen2.5-1.5b --recipe {recipe} --training.micro_batch_size 4",
        )
        for recipe in ("bf16", "fp8", "nvfp4")
    ),
    *(
        Row(
            GPT3,
            f"| `{recipe}` | {{weights}} | {{gradients}} | {{m}} | {{v}} | {{activations}} | {{workspace}} | "
            "{device} |",
            f"gpt3-345m --recipe {recipe} --memory-limit 24GB",
        )
        for recipe in ("bf16", "fp8", "msamp-o2", "fp4")
    ),
    *(
        Row(
            GPT3,
            f"| `{recipe}`{', emulated' if recipe == 'fp4' else ''} | {{best_step}} | {{best_time}} | "
            "{expect_step} | {expect_time} | {expect_price} |",
            f"gpt3-345m --recipe {recipe} --cluster h100 --price 3.50USD",
        )
        for recipe in ("bf16", "fp8", "fp4")
    ),
    *(
        Row(
            GPT3,
            f"| `{recipe}` | {{device}} | {{best_hours}} | {{expect_hours}} |",
            f"gpt3-6.7b --recipe {recipe} --cluster h100 {AGAIN} --tokens 100B",
        )
        for recipe in ("bf16", "msamp-o2")
    ),
    *(
        Row(
            FRONTIER,
            f"| {devices} | {'yes' if more else 'no'} | {{state}} | {{device}} |",
            f"{GUIDE} --devices {devices} {more}",
        )
        for devices, more in ((8, AGAIN), (8, ""), (512, AGAIN), (512, ""))
    ),
    *(
        Row(
            FRONTIER,
            f"| {'yes' if more else 'no'} | {{best_step}} | {{expect_step}} | {{expect_time}} | "
            "{expect_hours} | {expect_node_hours} |",
            f"{GUIDE} --devices 512 {more}",
        )
        for more in (AGAIN, "")
    ),
]


def main() -> None:
    """Write the rows."""
    for row in (row for row in ROWS if row.page in (sys.argv[1:] or [row.page])):
        page, pattern = DOCS / row.page, re.sub(r"\\\{\w+\\\}", "[^|]+", re.escape(row.template))
        text, count = re.subn(f"^{pattern}$", row.text(), page.read_text(encoding="utf-8"), flags=re.M)
        assert count == 1, row.template
        page.write_text(text, encoding="utf-8")


DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.tier("nightly", keep=1)  # plans of real models; `make pages` runs all
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{Path(row.page).stem} {row.options}")
def test_a_row_is_made_by_its_command(row):
    assert row.text() in (DOCS / row.page).read_text(encoding="utf-8").splitlines()


@pytest.mark.tier("nightly")  # plans of real models
@pytest.mark.parametrize(("page", "number"), [("plan.md", 0), ("plan.md", 1), (CARD, 0), (GPT3, 0)])
def test_a_page_shows_what_its_commands_print(page, number, narrowgauge):
    """Line breaks aside; `...` stands for what is left out."""
    page = (DOCS / page).read_text(encoding="utf-8")
    line = blocks(page, "sh")[number].replace("\\\n", " ").split()
    printed = " ".join(narrowgauge(*line[1:]).out.split())
    for part in " ".join(blocks(page, "text")[number].split()).split(" ... "):
        assert part in printed


if __name__ == "__main__":
    main()
