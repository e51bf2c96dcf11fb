"""`lint` is silent on what the programs of other people write, and names each fault that is put in."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowgauge.checkpoint.interop.gguf.container import read_gguf
from narrowgauge.checkpoint.lint.lint import lint
from narrowgauge.checkpoint.lint.rules import RULES, SOURCES
from narrowgauge.errors import UserError
from support.quantized_checkpoints import SOUND

QUICK = ("deepseek", "gguf-MXFP4")
Q, K, DOWN = (f"model.layers.1.{n}" for n in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"))


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """The path of a sound checkpoint, made once."""
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        package, make = SOUND[name]
        pytest.importorskip(package, reason=f"{package} writes this checkpoint, and is not installed")
        if name not in made:
            made[name] = make(tmp_path_factory.mktemp(name))
        return made[name]

    return path


@pytest.mark.tier("thorough", keep=QUICK)
@pytest.mark.filterwarnings("ignore")  # of the packages that write
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_checkpoint_of_another_program_has_no_finding(sound, name):
    for whole in (False, True):
        found = lint(sound(name), whole)
        assert not found.findings, found.table()
        assert found.narrow_tensors == (0 if name == "gguf-BF16" else 28)
        assert found.wide_tensors == (34 if name == "gguf-BF16" else 6)


@dataclass
class Open:
    """A checkpoint of safetensors in memory, for a fault to be put in."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    folder: Path

    def change(self, name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tensors[name] = how(self.tensors[name].clone())

    def each(self, ending: str, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        assert any(name.endswith(ending) for name in self.tensors), ending
        for name in list(self.tensors):
            if name.endswith(ending):
                self.change(name, how)

    def drop(self, layer: str) -> None:
        self.tensors = {n: t for n, t in self.tensors.items() if not n.startswith(layer + ".")}

    @property
    def said(self) -> dict[str, Any]:
        return self.config["quantization_config"]


def put(code: int, count: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    """Overwrite the first bytes."""

    def change(t: torch.Tensor) -> torch.Tensor:
        t.view(torch.uint8).view(-1)[:count] = code
        return t

    return change


def reciprocal(t: torch.Tensor) -> torch.Tensor:
    return 1 / t


def e8m0_negated(t: torch.Tensor) -> torch.Tensor:
    return 254 - t


def wide(c: Open, layer: str) -> None:
    shape = (256, 128) if "mlp.gate" in layer else (128, 256) if layer == DOWN else (128, 128)
    c.drop(layer)
    c.tensors[f"{layer}.weight"] = torch.randn(shape).bfloat16() * 0.05


def all_wide(c: Open) -> None:
    for name in {n.rpartition(".")[0] for n in c.tensors if "_proj" in n}:
        wide(c, name)


def ignored(rule: str) -> Callable[[Open], None]:
    def change(c: Open) -> None:
        key = "modules_to_not_convert" if c.said["quant_method"] == "fp8" else "ignore"
        table = c.said.get("quantization", c.said)
        key = "exclude_modules" if "exclude_modules" in table else key
        table[key] = [*table.get(key, []), rule]

    return change


def no_config(c: Open) -> None:
    del c.config["quantization_config"]


def rename(name: str, to: str) -> Callable[[Open], None]:
    def change(c: Open) -> None:
        c.tensors[to] = c.tensors.pop(name)

    return change


def at(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Open], None]:
    return lambda c: c.change(name, how)


def without(name: str) -> Callable[[Open], None]:
    def change(c: Open) -> None:
        del c.tensors[name]

    return change


def other_format(kind: str) -> Callable[[Open], None]:
    def change(c: Open) -> None:
        if "quantization" in c.said:
            c.said["quantization"]["quant_algo"] = kind
        else:
            weights = c.said["config_groups"]["group_0"]["weights"]
            weights |= {"num_bits": 8, "group_size": None, "strategy": "tensor"}

    return change


def everywhere(ending: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Open], None]:
    return lambda c: c.each(ending, how)


Damage = tuple[Callable[[Open], None], str, str]
EVERY: dict[str, Damage] = {
    "no config": (no_config, "no-config", "config.json"),
    "all wide": (all_wide, "nothing-narrow", "config.json"),
    "typo in a rule": (
        ignored("model.layers.1.self_atn.q_proj"),
        "ignore-matches-nothing",
        "model.layers.1.self_atn.q_proj",
    ),
    "narrow and left out": (ignored(DOWN), "ignored-narrow", DOWN),
    "one layer wide": (lambda c: wide(c, DOWN), "promised-narrow", DOWN),
    "k wide, q and v narrow": (lambda c: wide(c, K), "fused-precision", Q),
}


def of_nvfp4(second: str, input_scale: str, codes: str) -> dict[str, Damage]:
    return EVERY | {
        "all inverted": (everywhere(second, reciprocal), "scale-inverted", DOWN),
        "one inverted": (at(DOWN + second, reciprocal), "scale-inverted", DOWN),
        "NaN in a scale": (at(f"{DOWN}.weight_scale", put(0x7F)), "scale-nan", DOWN),
        "negative scale": (at(f"{DOWN}.weight_scale", put(0xC0)), "scale-sign", DOWN),
        "NaN above": (at(DOWN + second, lambda t: t * torch.nan), "scale-nan", DOWN),
        "no block scales": (without(f"{DOWN}.weight_scale"), "scale-missing", DOWN),
        "no tensor scale": (without(DOWN + second), "scale-missing", DOWN),
        "half of the scales": (at(f"{DOWN}.weight_scale", lambda t: t[:, ::2]), "scale-shape", DOWN),
        "k by another scale": (at(K + second, lambda t: t * 1.25), "fused-scales", Q),
        "one layer 1000 times": (at(DOWN + second, lambda t: t * 1000), "scale-outlier", DOWN),
        "no input scale": (without(DOWN + input_scale), "input-scale-missing", DOWN),
        "input scale inverted": (at(DOWN + input_scale, reciprocal), "input-scale", DOWN),
        "all codes at the top": (at(DOWN + codes, put(0x77, 1 << 14)), "codes-saturated", DOWN),
        "nearly all codes zero": (at(DOWN + codes, put(0, (1 << 14) - 64)), "codes-zero", DOWN),
        "codes without a weight": (without(DOWN + codes), "scale-alone", DOWN),
    }


DAMAGED: dict[str, dict[str, Damage]] = {
    "ct-NVFP4": of_nvfp4(".weight_global_scale", ".input_global_scale", ".weight_packed")
    | {"says FP8": (other_format("fp8"), "other-format", DOWN)},
    "modelopt-NVFP4": of_nvfp4(".weight_scale_2", ".input_scale", ".weight")
    | {"says FP8": (other_format("FP8"), "other-format", DOWN)},
    "ct-MXFP4": EVERY
    | {
        "all inverted": (everywhere(".weight_scale", e8m0_negated), "scale-inverted", DOWN),
        "NaN in a scale": (at(f"{DOWN}.weight_scale", put(255)), "scale-nan", DOWN),
        "no scales": (without(f"{DOWN}.weight_scale"), "scale-missing", DOWN),
        "half of the scales": (at(f"{DOWN}.weight_scale", lambda t: t[:, ::2]), "scale-shape", DOWN),
        "scales 2^30 up": (at(f"{DOWN}.weight_scale", lambda t: t + 30), "scale-range", DOWN),
        "scales 2^8 down": (at(f"{DOWN}.weight_scale", lambda t: t - 8), "scale-outlier", DOWN),
        "says FP8": (other_format("fp8"), "other-format", DOWN),
    },
    "ct-MXFP8": EVERY
    | {
        "all inverted": (everywhere(".weight_scale", e8m0_negated), "scale-inverted", DOWN),
        "NaN in a scale": (at(f"{DOWN}.weight_scale", put(255)), "scale-nan", DOWN),
        "NaN in the codes": (at(f"{DOWN}.weight", put(0x7F)), "nan-codes", DOWN),
        "no scales": (without(f"{DOWN}.weight_scale"), "scale-missing", DOWN),
    },
    "ct-FP8": EVERY
    | {
        "all inverted": (everywhere(".weight_scale", reciprocal), "scale-inverted", DOWN),
        "NaN in the codes": (at(f"{DOWN}.weight", put(0xFF)), "nan-codes", DOWN),
        "never filled in": (at(f"{DOWN}.weight_scale", lambda t: t * 0 - 3.4e38), "scale-sign", DOWN),
        "scale of 0": (at(f"{DOWN}.weight_scale", lambda t: t * 0), "scale-sign", DOWN),
        "no scale": (without(f"{DOWN}.weight_scale"), "scale-missing", DOWN),
        "input scale of 0": (at(f"{DOWN}.input_scale", lambda t: t * 0), "input-scale", DOWN),
        "no input scale": (without(f"{DOWN}.input_scale"), "input-scale-missing", DOWN),
        "says INT4": (
            lambda c: c.said["config_groups"]["group_0"]["weights"].update(type="int"),
            "other-format",
            DOWN,
        ),
    },
    "deepseek": EVERY
    | {
        "all inverted": (everywhere(".weight_scale_inv", reciprocal), "scale-inverted", DOWN),
        "infinite scale": (at(f"{DOWN}.weight_scale_inv", lambda t: t / 0), "scale-nan", DOWN),
        "negative scale": (at(f"{DOWN}.weight_scale_inv", lambda t: -t), "scale-sign", DOWN),
        "NaN in the codes": (at(f"{DOWN}.weight", put(0x7F)), "nan-codes", DOWN),
        "scales dropped": (without(f"{DOWN}.weight_scale_inv"), "scale-missing", DOWN),
        "raw codes, no scale": (at(f"{DOWN}.weight_scale_inv", lambda t: t * 0 + 1), "scale-range", DOWN),
        "one layer 1/100": (at(f"{DOWN}.weight_scale_inv", lambda t: t / 100), "scale-outlier", DOWN),
    },
}
CASES = [(kind, name) for kind, damages in DAMAGED.items() for name in damages]


def test_at_least_ten_faults_of_each_kind_and_every_rule():
    assert min(map(len, DAMAGED.values())) >= 10
    seen = {rule for damages in DAMAGED.values() for _, rule, _ in damages.values()}
    assert SOURCES.keys() - seen == {"damaged-file", "missing-tensor"}  # the tests of files
    assert len(RULES) == len(set(RULES))


@pytest.mark.tier("thorough", keep=("deepseek",))
@pytest.mark.filterwarnings("ignore")  # of the packages that write
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_fault_is_named(sound, tmp_path, kind, name):
    change, rule, tensor = DAMAGED[kind][name]
    folder = sound(kind)
    c = Open(
        load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()), tmp_path
    )
    change(c)
    save_file({n: t.contiguous() for n, t in c.tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(c.config))
    found = lint(tmp_path)
    assert (rule, tensor) in [(f.rule, f.tensor) for f in found.findings], found.table()


@pytest.mark.parametrize("cut", [4, 200, -64])
def test_a_file_that_was_cut_off(sound, tmp_path, cut):
    data = (sound("deepseek") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:cut])
    assert lint(tmp_path).findings[0].rule == "damaged-file"


def test_a_tensor_that_only_the_index_has(sound, tmp_path):
    shutil.copy(sound("deepseek") / "model.safetensors", tmp_path / "a.safetensors")
    listed = dict.fromkeys(load_file(tmp_path / "a.safetensors"), "a.safetensors") | {
        f"{DOWN}.bias": "a.safetensors"
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    (found,) = lint(tmp_path).findings
    assert (found.rule, found.tensor) == ("missing-tensor", f"{DOWN}.bias")


GGUF = {
    "cut off": ("gguf-MXFP4", lambda data, at: data[: -(1 << 14)], "damaged-file"),
    "cut in the header": ("gguf-MXFP4", lambda data, at: data[:100], "damaged-file"),
    "NaN in an E8M0": ("gguf-MXFP4", lambda data, at: put_at(data, at, 255), "scale-nan"),
    "E8M0 2^40 up": ("gguf-MXFP4", lambda data, at: put_at(data, at, 160), "scale-range"),
    "infinite d": ("gguf-Q8_0", lambda data, at: put_at(data, at + 1, 0x7C, at, 0), "scale-nan"),
    "d of a Q8_0 2^13 up": ("gguf-Q8_0", lambda data, at: put_at(data, at + 1, 0x5C), "scale-range"),
    "codes at the top": ("gguf-MXFP4", lambda data, at: saturated(data, at), "codes-saturated"),
    "infinite m of a Q5_1": (
        "gguf-Q5_1",
        lambda data, at: put_at(data, at + 2, 0, at + 3, 0x7C),
        "scale-nan",
    ),
    "no such type": ("gguf-Q8_0", lambda data, at: other_type(data, 99), "damaged-file"),
    "no such version": ("gguf-Q8_0", lambda data, at: put_at(data, 4, 9), "damaged-file"),
    "NaN in a Q4_0": ("gguf-Q4_0", lambda data, at: put_at(data, at + 1, 0x7E), "scale-nan"),
}


def put_at(data: bytes, *places: int) -> bytes:
    array = np.frombuffer(data, np.uint8).copy()
    for at, code in zip(places[::2], places[1::2], strict=True):
        array[at] = code
    return array.tobytes()


def saturated(data: bytes, at: int) -> bytes:
    array = np.frombuffer(data, np.uint8).copy()
    blocks = array[at : at + 17 * 1024].reshape(-1, 17)
    blocks[:, 1:] = 0x77
    return array.tobytes()


def other_type(data: bytes, number: int) -> bytes:
    name = b"blk.1.ffn_down.weight"
    return put_at(data, data.index(name) + len(name) + 4 + 16, number)


def test_a_header_with_any_byte_changed_is_a_finding_or_another_checkpoint(sound, tmp_path):
    draw = np.random.default_rng(0)
    for kind, file, head in (("gguf-MXFP4", "model.gguf", 400), ("deepseek", "model.safetensors", 1000)):
        path = sound(kind)
        data = (path if path.is_file() else path / file).read_bytes()
        for i in range(40):
            (tmp_path / file).write_bytes(put_at(data, int(draw.integers(4, head)), int(draw.integers(256))))
            assert lint(tmp_path / file).as_json()["findings"] is not None, i


@pytest.mark.tier("thorough", keep=("NaN in an E8M0",))
@pytest.mark.parametrize("name", GGUF)
def test_a_fault_of_a_gguf_is_named(sound, tmp_path, name):
    kind, change, rule = GGUF[name]
    path = sound(kind)
    data = path.read_bytes()
    tensor = next(t for t in read_gguf(path).tensors if t.name == "blk.1.ffn_down.weight")
    (tmp_path / "model.gguf").write_bytes(change(data, data.index(tensor.data.tobytes())))
    findings = lint(tmp_path / "model.gguf").findings
    assert rule in {f.rule for f in findings}
    if rule != "damaged-file":
        assert {f.tensor for f in findings} == {"blk.1.ffn_down"}, findings


def test_the_table_names_the_source_and_shortens(sound, tmp_path):
    c = Open(load_file(sound("deepseek") / "model.safetensors"), {}, tmp_path)
    c.each(".weight_scale_inv", reciprocal)
    save_file(c.tensors, tmp_path / "model.safetensors")
    found = lint(tmp_path / "model.safetensors")
    text = found.table()
    assert "28 narrow weights (28 fp8), 6 wide" in text
    assert SOURCES["scale-inverted"] in text
    assert "and 25 more" in text
    assert {f["rule"] for f in found.as_json()["findings"]} == {"scale-inverted"}


def test_a_pickle_and_a_folder_without_weights_are_refused(tmp_path):
    with pytest.raises(UserError, match=re.escape("has no .safetensors and no .gguf")):
        lint(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="is a pickle"):
        lint(tmp_path)
    with pytest.raises(UserError, match="is a pickle"):
        lint(tmp_path / "pytorch_model.bin")


def test_a_regular_expression_that_could_take_forever_is_not_tried(sound, tmp_path):
    c = Open(load_file(sound("deepseek") / "model.safetensors"), {}, tmp_path)
    rule = "re:(.*.*)*x$"
    said = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [rule]}
    save_file(c.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    assert not lint(tmp_path).findings


def test_the_command_prints_and_says_by_its_exit_code(narrowgauge, sound, tmp_path):
    ended = narrowgauge("lint", sound("deepseek"))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith("no findings\n")
    save_file({f"{DOWN}.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors")
    ended = narrowgauge("lint", tmp_path / "m.safetensors", "--json")
    assert ended.code == 1
    assert [f["rule"] for f in json.loads(ended.out)["findings"]] == ["scale-missing"]


PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def test_the_page_shows_what_is_printed_and_has_every_rule(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    save_file({f"{DOWN}.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors")
    text = lint(tmp_path / "m.safetensors").table().partition(": ")[2]
    assert f"```text\n{text}\n```" in page
    rules = page.partition("\n## Lint\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| (.*) \|$", rules, re.MULTILINE)
    assert dict(rows) == dict(SOURCES)
