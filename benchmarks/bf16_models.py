"""How much of the fp32 twin's learning a bf16 model of transformers keeps under each recipe.

    OMP_NUM_THREADS=1 python benchmarks/bf16_models.py --text novels/ --out bf16-models.jsonl
        [--recipes torch,fp32,bf16-sr,eco] [--seeds 0,1,2] [--steps 150] [--lr 1e-5]

A small Llama learns the bytes of the texts in float32, is saved in bfloat16, and is loaded twice by
`from_pretrained`: as it is, which is bfloat16 since transformers 5, and in float32, the twin. Both see the
same batches at one constant rate, the twin under torch's AdamW. A seed sets initial weights and batches.

    share    (start - end) / (start - end of the twin): losses in nats per byte of held-out text, of weights
             as `state_dict` has them, in float32
    own      the same with losses under the arm's own forward pass, which rounds as in training

The arm `torch` is the bfloat16 model under torch's AdamW, without narrowgauge. Each run is a line of the
file; runs that it holds are not repeated. The table has means with 95 % intervals by Student's t over seeds.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.system.t_interval import interval

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
RECIPES = "torch,fp32,bf16-sr,msamp-o1,msamp-o2,msamp-o3,eco,mxfp8,nvfp4"
BATCH, LENGTH, HELD_OUT = 8, 64, 256  # sequences, bytes of each, held-out sequences


@dataclass(frozen=True)
class Texts:
    """Bytes as tokens; the last twentieth is held out."""

    tokens: torch.Tensor

    @classmethod
    def of(cls, path: Path) -> "Texts":
        """Read a file, or all texts of a folder in the order of their names."""
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        data = b"".join(file.read_bytes() for file in files)
        return cls(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _rows(self, starts: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.tokens[i : i + LENGTH] for i in starts.tolist()]).long()

    def batches(self, seed: int, count: int) -> list[torch.Tensor]:
        """Some batches (BATCH, LENGTH) from random places of the text for training."""
        generator = torch.Generator().manual_seed(seed)
        end = len(self.tokens) * 19 // 20 - LENGTH
        return [self._rows(torch.randint(end, (BATCH,), generator=generator)) for _ in range(count)]

    def held_out(self) -> tuple[torch.Tensor, ...]:
        """Always the same sequences, evenly spaced over the held-out text."""
        start = len(self.tokens) * 19 // 20
        starts = torch.linspace(start, len(self.tokens) - LENGTH, HELD_OUT).long()
        return self._rows(starts).split(64)


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(input_ids=rows, labels=rows).loss


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, texts: Texts) -> float:
    return sum(loss_of(model, rows).double().item() for rows in texts.held_out()) / len(texts.held_out())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    for rows in batches:
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()


def pretrained(texts: Texts, seed: int, steps: int, folder: str) -> None:
    """Train from scratch in float32, and save in bfloat16."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, tie_word_embeddings=False, **SIZES)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train(model, optimizer, texts.batches(1000 + seed, steps))
    model.bfloat16().save_pretrained(folder)


def run(arm: str, folder: str, texts: Texts, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Held-out losses of an arm before and after its steps."""
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = twin if arm == "twin" else AutoModelForCausalLM.from_pretrained(folder)
    if arm != "twin" and model.dtype != torch.bfloat16:
        raise SystemExit(f"from_pretrained loaded {model.dtype}; this needs transformers 5")
    start = held_out_loss(twin, texts)
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    if arm not in ("twin", "torch"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = ng.convert(model, arm)
        make = partial(ng.AdamW, recipe=arm)
    optimizer = make(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    own_start = held_out_loss(model, texts)
    train(model, optimizer, texts.batches(2000 + seed, options.steps))
    own_end = held_out_loss(model, texts)
    twin.load_state_dict({name: value.detach().float() for name, value in model.state_dict().items()})
    return {"start": start, "end": held_out_loss(twin, texts), "own_start": own_start, "own_end": own_end}


def table(rows: list[dict[str, Any]]) -> None:
    """One line for each arm, over all seeds."""
    found = {(row["seed"], row["arm"]): row for row in rows}
    fell = {
        key: {own: row[f"{own}start"] - row[f"{own}end"] for own in ("", "own_")}
        for key, row in found.items()
    }
    print("| recipe | n | share of the learning | under its own forward pass |\n|---|---|---|---|")
    for arm in dict.fromkeys(arm for _, arm in found if arm != "twin"):
        seeds = [seed for seed, other in found if other == arm]
        shares = [
            interval([100 * fell[seed, arm][own] / fell[seed, "twin"][""] for seed in seeds])
            for own in ("", "own_")
        ]
        cells = [f"{s.mean:.1f} % ({s.low:.1f} to {s.high:.1f})" for s in shares]
        print(f"| {arm} | {len(seeds)} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="a text, or a folder of .txt files")
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each run")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--pretraining", type=int, default=600, help="steps in float32 before")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=1e-5)
    options = parser.parse_args()
    texts = Texts.of(options.text)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for seed in map(int, options.seeds.split(",")):
        missing = [
            arm
            for arm in ("twin", *options.recipes.split(","))
            if not any((row["seed"], row["arm"]) == (seed, arm) for row in rows)
        ]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            pretrained(texts, seed, options.pretraining, folder)
            for arm in missing:
                rows.append({"seed": seed, "arm": arm, **run(arm, folder, texts, options, seed)})
                print(rows[-1], flush=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    table(rows)


if __name__ == "__main__":
    main()
