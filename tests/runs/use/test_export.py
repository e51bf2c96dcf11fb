"""Out of a run and into one: the same model, whatever the recipe, and never half of it."""

import copy
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge.nn import Linear
from narrowgauge.recipes import recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.data import bytes_tokenizer, export_tokens, open_data, train_bpe
from narrowgauge.trainer.models import Transformer
from narrowgauge.trainer.runs import open_run
from narrowgauge.trainer.runs.choices import EXPORT_FORMATS
from narrowgauge.trainer.runs.use import export
from narrowgauge.trainer.runs.use.branch import branch_run
from narrowgauge.trainer.runs.use.export import activation_scales, export_run, import_model
from narrowgauge.trainer.runs.use.trained_model import run_data
from narrowgauge.trainer.training import make_config
from support.in_process import run_here

IDS = torch.arange(30)[None] % 257
GPT2 = {"model.name": "gpt2-debug", "model.kv_heads": 2, "model.ffn_dim": 128}


def plain_logits(path):
    """Of the weights a run has, in float32 arithmetic."""
    there = open_run(path, "cpu")
    model = Transformer(there.model.config)
    model.load_state_dict(there.weights())
    with torch.no_grad():
        return model(IDS)


@pytest.mark.tier("nightly", keep=("msamp-o3", "coat"))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", recipe_names())
def test_a_run_under_any_recipe_opens_in_transformers(trained, tmp_path, name):
    path = trained({"recipe.name": name, "training.steps": 2})
    export_run(path, "hf", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert (theirs(IDS).logits - plain_logits(path)).abs().max() < 1e-5


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("to", ["hf", "llmc"])
def test_what_goes_out_comes_in(trained, tmp_path, to, text, look):
    changes = {"recipe.name": "msamp-o3", "training.steps": 2, "model.initial_std": 0.02}
    path = trained(changes | (GPT2 if to == "llmc" else {}))
    export_run(path, to, tmp_path / "out")
    where = tmp_path / "out" / "model.bin" if to == "llmc" else tmp_path / "out"
    back = import_model(where, tmp_path / "back", source=text)
    there = open_run(back, "cpu")
    before = open_run(path, "cpu")
    assert all(torch.equal(there.weights()[n], t) for n, t in before.weights().items())
    assert there.config.spec.model == before.config.spec.model
    assert there.tokenizer.to_json() == before.tokenizer.to_json()
    # The same without a run in between.
    assert torch.equal(open_run(where, "cpu").model(IDS), there.model(IDS))
    assert [line["event"] for line in look(back).lines] == ["import"]
    assert (back / "recipe.toml").is_file()


@pytest.mark.tier("thorough")
@pytest.mark.tier("nightly", keep=("msamp-o3",))
@pytest.mark.parametrize("recipe", ["fp32", "msamp-o3"])
def test_a_run_starts_from_imported_weights(trained, tiny, tmp_path, text, recipe, look):
    base = trained({"recipe.name": "fp32"})
    export_run(base, "hf", tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "imported", source=text)
    changes = {"recipe.name": recipe, "model": {}, "validation.batches": 2}
    values = tiny(changes)
    values["model"] = {"weights": str(tmp_path / "imported")}
    del values["data"]["tokenizer"]
    tuned = run_here(values, tmp_path / "tuned")
    assert look(tuned).lines[1]["step"] == 0
    first, last = look(tuned).lines[1]["val_loss"], look(base).steps[-1]["val_loss"]
    assert first == pytest.approx(last, abs=1e-6 if recipe == "fp32" else 0.05)
    assert look(tuned).steps[-1]["val_loss"] < first
    # What was started from may be gone by the time the run is opened.
    (tmp_path / "imported").rename(tmp_path / "gone")
    assert open_run(tuned, "cpu").step == 6


QWEN_INSTRUCT = {
    "config.json": {"bos_token_id": 7, "eos_token_id": 9},
    "generation_config.json": {"bos_token_id": 7, "eos_token_id": [9, 7], "pad_token_id": 7, "top_p": 0.8},
    "tokenizer_config.json": {"eos_token": "ĉ", "add_bos_token": False, "model_max_length": 131072},
}
NOT_KEPT = {"auto_map": {"AutoTokenizer": ["evil.py", None]}, "tokenizer_class": "EvilTokenizer"}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.tier("thorough")
def test_what_a_model_says_of_its_special_tokens_survives(trained, tiny, tmp_path, text):
    """As Qwen2.5-Instruct, which stops at another token than the end of a document."""
    export_run(trained({"recipe.name": "fp32", "training.steps": 1}), "hf", tmp_path / "hf")
    for name, says in QWEN_INSTRUCT.items():
        values = json.loads((tmp_path / "hf" / name).read_text())
        code = NOT_KEPT if name == "tokenizer_config.json" else {}
        (tmp_path / "hf" / name).write_text(json.dumps(values | says | code))
    (tmp_path / "hf" / "chat_template.jinja").write_text(TEMPLATE)
    import_model(tmp_path / "hf", tmp_path / "imported", source=text)
    values = tiny({"recipe.name": "fp8", "training.steps": 1})
    values["model"] = {"weights": str(tmp_path / "imported")}
    del values["data"]["tokenizer"]
    run_here(values, tmp_path / "tuned")
    values["training"] = {**values["training"], "steps": 2}
    values["recipe"] = {"name": "fp8-row"}
    branch_run(tmp_path / "tuned", None, make_config(values), tmp_path / "converted")
    for name, to in (
        *((name, "hf") for name in ("hf", "imported", "tuned")),
        ("converted", "compressed-tensors"),
    ):
        out = tmp_path / f"{name} as {to}"
        export_run(tmp_path / name, to, out)
        for file, says in QWEN_INSTRUCT.items():
            assert json.loads((out / file).read_text()).items() >= says.items(), (out, file)
        settings = json.loads((out / "tokenizer_config.json").read_text())
        assert "auto_map" not in settings, "it names code that is not exported"
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert settings["chat_template"] == TEMPLATE
    theirs = AutoTokenizer.from_pretrained(out.with_name("tuned as hf"))
    assert theirs.eos_token_id == 9
    spoken = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert spoken == "<user>hi"
    import_model(tmp_path / "hf", tmp_path / "other", tmp_path / "imported" / "tokenizer.json", text)
    assert "tokenizer_config.json" not in (tmp_path / "other" / "special_tokens.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(out.with_name("tuned as hf")).generation_config.top_p == 0.8


def test_a_start_from_another_model_or_tokenizer_is_refused(trained, tiny, tmp_path):
    base = trained({"recipe.name": "fp32"})
    for changes, words in [
        ({"model.weights": str(tmp_path / "nowhere")}, "is not a run directory"),
        ({"model.weights": str(base), "data.tokenizer": "bpe-257"}, "is not the tokenizer"),
        ({"model.weights": str(base), "model.ffn_dim": 96}, "is another model: blocks.0"),
    ]:
        values = tiny(changes)
        values["model"] = {key[6:]: value for key, value in changes.items() if key.startswith("model.")}
        with pytest.raises(UserError, match=words):
            run_here(values, tmp_path / "new")
        assert not (tmp_path / "new" / "checkpoints").exists()
    export_run(base, "hf", tmp_path / "out")
    train_bpe(["many words to learn from, many more words"] * 30, 280).save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"and the model .* only 257"):
        import_model(tmp_path / "out", tmp_path / "back", tmp_path / "tokenizer.json")


WRITERS = {
    "hf": "write_folder",
    "llmc": "write_llmc",
    **dict.fromkeys(("compressed-tensors", "modelopt"), "write_quantized"),
    "gguf": "write_gguf_model",
}


@pytest.mark.tier("nightly", keep=("hf", "gguf", "modelopt"))
@pytest.mark.tier("thorough", keep=1)
@pytest.mark.parametrize("to", EXPORT_FORMATS)
def test_an_export_that_is_half_written_or_does_not_hold_the_weights_is_not_published(
    trained, tmp_path, to, monkeypatch
):
    """The disk is full at any point; or one number of a layer differs, as a faulty writer would leave it."""
    name = "mxfp8" if to == "modelopt" else "fp8"
    path = trained({"recipe.name": name, "training.steps": 2} | (GPT2 if to == "llmc" else {}))
    module = export.gguf_model if to == "gguf" else export
    write = getattr(module, WRITERS[to])

    def stop(name):
        if name.startswith("exchange:"):
            raise OSError(28, "No space left on device")

    def faulty(folder, of, weights, *settings):
        wrong = weights["blocks.1.down.weight"].clone()
        wrong[3, 5] += 0.05
        if to in (*export.QUANTIZED, "gguf"):  # it takes narrow weights from the model
            of = copy.deepcopy(of)
            of.blocks[1].down.weight.data.copy_(wrong)
        return write(folder, of, {**weights, "blocks.1.down.weight": wrong}, *settings)

    with monkeypatch.context() as full:
        full.setattr("narrowgauge.system.files.crash_point", stop)
        with pytest.raises(OSError, match="No space left"):
            export_run(path, to, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == []
    monkeypatch.setattr(module, WRITERS[to], faulty)
    words = r"read back, and 'blocks.1.down.weight' differs .* so nothing was kept"
    with pytest.raises(UserError, match=words):
        export_run(path, to, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == []


KEPT = 'cast = "nvfp4", keep_channels = 0.1, keep_cast = "mxfp8"'
#: (recipe, format, other arguments, part of the sentence); "{text}" is the text of the run.
REFUSED = [
    ("mine", "compressed-tensors", {}, r"keep_channels = 0.1.*cannot express; use --to hf"),
    ("mxfp8", "compressed-tensors", {"calibrate": "text"}, "nothing to calibrate"),
    ("nvfp4", "modelopt", {"calibrate": "recorded"}, "remembers no amax"),
    ("fp8", "gguf", {"calibrate": "text"}, "holds no scales of activations"),
    ("fp8", "modelopt", {}, "--calibrate TEXT for FP8"),
]


@pytest.mark.tier("thorough", keep=1)
@pytest.mark.parametrize(("recipe", "to", "given", "words"), REFUSED)
def test_an_export_that_cannot_be_is_refused(trained, tmp_path, text, recipe, to, given, words):
    if recipe == "mine":
        recipe = str(tmp_path / "mine.toml")
        (tmp_path / "mine.toml").write_text(f"fprop.x = {{{KEPT}}}\nfprop.w = {{{KEPT}}}\n")
    path = trained({"recipe.name": recipe, "training.steps": 1})
    if given.get("calibrate") == "text":
        given = {"calibrate": text}
    with pytest.raises(UserError, match=words):
        export_run(path, to, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.tier("thorough")
def test_a_text_gives_each_layer_the_scale_of_its_largest_input(trained, text):
    opened = open_run(trained({"recipe.name": "fp8", "training.steps": 1}), "cpu")
    scales = activation_scales(opened, text)
    layers = {name: m for name, m in opened.model.named_modules() if isinstance(m, Linear)}
    assert scales.keys() == {name for name, m in layers.items() if m.spec.casts["fprop.w"].is_scaled}
    seen = []
    opened.model.blocks[0].qkv.register_forward_pre_hook(lambda _, x: seen.append(x[0].abs().max()))
    assert activation_scales(opened, text) == scales
    assert scales["blocks.0.qkv"] == float(torch.stack(seen).max().float() / 448)


@pytest.mark.tier("thorough")
def test_a_model_without_a_tokenizer_is_given_one_or_token_files(trained, text, tmp_path, capsys):
    export_run(trained({"training.steps": 1}), "gguf", tmp_path / "gguf")
    [file] = (tmp_path / "gguf").glob("*.gguf")
    (tmp_path / "gguf" / "tokenizer.json").unlink(missing_ok=True)
    assert open_run(file, "cpu").prompt_ids("ab")[-2:] == [97, 98], "the file has it"
    export_run(trained({"training.steps": 1} | GPT2), "llmc", tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink()
    model = tmp_path / "out" / "model.bin"
    with pytest.raises(UserError, match=r"came without a tokenizer.*--tokenizer"):
        assert open_run(import_model(model, tmp_path / "back"), "cpu").tokenizer
    bytes_tokenizer().save(tmp_path / "tokenizer.json")
    assert open_run(tmp_path / "back", "cpu", tmp_path / "tokenizer.json").prompt_ids("ab") == [97, 98]
    again = import_model(model, tmp_path / "more", tmp_path / "tokenizer.json")
    assert open_run(again, "cpu").tokenizer.is_bytes
    export_tokens(open_data(str(text), "bytes"), "llmc", tmp_path / "tokens")
    words = ["--batches", "2", "--sequence-length", "32", "--data"]
    main(["eval", str(model), *words, str(tmp_path / "tokens")])
    assert re.search(r"validation loss \d\.\d+ nats per token$", capsys.readouterr().out.strip())
    with pytest.raises(UserError, match="text needs one"):
        run_data(open_run(model, "cpu"), str(text))
