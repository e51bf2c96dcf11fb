"""export, import, and sample and eval of what came out: as a user meets them."""

import json
import re
import shutil

import pytest
import torch

SHORT = ("--sequence-length", "32", "--batches", "2")


def loss_of(ended):
    assert ended.code == 0, ended.err
    return float(re.search(r"validation loss ([\d.]+)", ended.out)[1])


@pytest.fixture(scope="module")
def exported(narrowgauge, finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "hf"
    ended = narrowgauge("export", finished, "--to", "hf", "--out", out)
    assert (ended.code, ended.err) == (0, "")
    first, remark = ended.out.splitlines()
    assert first == f"{out}: {finished} after step 6, as hf"
    assert remark.startswith("weights are stored as they are before the recipe's casts")
    return out


@pytest.fixture(scope="module")
def imported(narrowgauge, exported, text):
    run = exported.parent / "run"
    ended = narrowgauge("import", exported, "--out", run, "--data", text)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"run directory: {run}\nthe weights were stored in fp32 (hf) and are kept in")
    assert f"--model.weights {run}" in ended.out
    return run


def test_run_folder_and_import_are_one_model(narrowgauge, exported, imported, text):
    losses = [loss_of(narrowgauge("eval", p, "--data", text, *SHORT)) for p in (imported, exported)]
    assert losses[0] == losses[1]
    ended = narrowgauge("eval", imported)  # on its own text, which is too short for its own windows
    assert (ended.code, "needs 1025" in ended.err) == (2, True)
    line = ("--prompt", "narrow", "--tokens", "8", "--temperature", "0")
    said = [narrowgauge("sample", path, *line) for path in (imported, exported)]
    assert said[0] == said[1]
    assert said[0].out.startswith("narrow")


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("more", [(), ("--temperature", "1", "--top-p", "0.9", "--seed", "3")])
def test_the_cache_changes_no_token(narrowgauge, imported, finished, more):
    line = ("--prompt", "narrow gauge", "--tokens", "30", "--temperature", "0", *more)
    on, off = (narrowgauge("sample", imported, *line, "--cache", cache) for cache in ("on", "off"))
    assert on.code == 0
    assert on == off
    # fp8 scales all tokens together, so there the whole context is computed for each token.
    auto, off = (narrowgauge("sample", finished, *line, "--cache", cache) for cache in ("auto", "off"))
    assert auto == off


@pytest.mark.tier("thorough")
def test_training_goes_on_from_an_import(narrowgauge, line, imported, finished, tmp_path, look):
    """Without options for the model or its tokenizer, and from exactly where the first run ended."""
    verb, *words = line()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    kept = [w for key, value in pairs if not key.startswith(("--model.", "--data.tok")) for w in (key, value)]
    ended = narrowgauge(verb, "--model.weights", imported, *kept, "--out", tmp_path / "tuned")
    assert ended.code == 0, ended.err
    tuned = look(tmp_path / "tuned")
    assert tuned.lines[1]["val_loss"] == look(finished).steps[-1]["val_loss"]
    assert len(tuned.steps) == 6


def test_compressed_and_gguf(narrowgauge, finished, tmp_path):
    for to, file in (("compressed-tensors", "config.json"), ("gguf", "model.gguf")):
        ended = narrowgauge("export", finished, "--to", to, "--out", tmp_path / to)
        assert (ended.code, ended.err) == (0, "")
        assert (tmp_path / to / file).is_file()
        assert (tmp_path / to / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("point", ["filled", "renamed"])
@pytest.mark.parametrize("verb", ["export", "import"])
def test_a_kill_leaves_all_or_nothing(narrowgauge, finished, exported, tmp_path, verb, point):
    line = [verb, finished, "--to", "hf"] if verb == "export" else [verb, exported]
    ended = narrowgauge(*line, "--out", tmp_path / "out", NARROWGAUGE_CRASH_AT=f"exchange:{point}")
    assert ended.code in (137, -9)
    assert (tmp_path / "out").exists() == (point == "renamed")
    if point == "filled":
        assert narrowgauge(*line, "--out", tmp_path / "out").code == 0
    opened = narrowgauge("sample", tmp_path / "out", "--prompt", "a", "--tokens", "2")
    assert opened.code == 0, opened.err


@pytest.mark.parametrize(
    ("spoken", "words"),
    [
        (["export", "RUN", "--to", "onnx", "--out", "OUT"], ["unknown format 'onnx'", "hf"]),
        (["export", "RUN", "--to", "llmc", "--out", "OUT"], ["positions = learned", "--to hf"]),
        (["export", "RUN", "--to", "hf", "--out", "RUN"], ["there already", "--out"]),
        (["export", "RUN", "--to", "hf", "--out", "OUT", "--dtype", "int8"], ["unknown dtype 'int8'"]),
        (["export", "RUN", "--to", "hf"], ["--out"]),
        (["import", "OUT", "--out", "NEW"], ["does not exist", "Hugging Face"]),
        (["import", "RUN", "--out", "NEW"], ["is already a run", "--model.weights"]),
        (["eval", "RUN", "--task", "mmlu"], ["unknown task 'mmlu'", "hellaswag:FILE"]),
        (["eval", "RUN", "--task", "hellaswag:OUT"], ["cannot be read"]),
        (["eval", "RUN", "--limit", "0"], ["--limit 0 must be at least 1"]),
        (["sample", "RUN", "--prompt", "a", "--top-p", "0"], ["top_p = 0.0"]),
        (["sample", "OUT", "--prompt", "a"], ["not a run directory"]),
    ],
)
def test_mistakes_are_one_sentence(narrowgauge, refused, finished, tmp_path, spoken, words):
    places = {"RUN": finished, "OUT": tmp_path / "out", "NEW": tmp_path / "new"}
    line = [str(places.get(word, word)).replace(":OUT", f":{tmp_path / 'out'}") for word in spoken]
    refused(narrowgauge(*line), *words)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.tier("thorough")
def test_pickles_are_refused(narrowgauge, refused, exported, tmp_path):
    shutil.copytree(exported, tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.ones(3)}, tmp_path / "folder" / "pytorch_model.bin")
    for line in (["import", tmp_path / "folder", "--out", tmp_path / "run"], ["eval", tmp_path / "folder"]):
        refused(narrowgauge(*line), "pytorch_model.bin", "a pickle", "safetensors")
    assert not (tmp_path / "run").exists()


def test_the_harness_scores_an_exported_model(narrowgauge, exported, finished, tmp_path):
    """Offline, on a task that is made here; its acc is ours, for sums of log probabilities are."""
    pytest.importorskip("lm_eval")
    rows = [
        {"ctx": "narrow gauge " * i, "endings": ["rail", "coal and steam", "x"], "label": i % 3}
        for i in range(1, 13)
    ]
    (tmp_path / "rails.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rails.yaml").write_text(
        "task: rails\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'rails.jsonl'}\ntest_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{ctx}}"\ndoc_to_choice: "{{endings}}"\ndoc_to_target: "{{label}}"\n'
        'target_delimiter: " "\nmetric_list:\n  - metric: acc\n'
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    task = ("--task", "lm-eval:rails", "--task-folder", tmp_path, "--device", "cpu")
    ended = narrowgauge("eval", exported, *task, **offline)
    assert ended.code == 0, ended.err
    theirs = re.search(r"rails, acc ([\d.]+)", ended.out)[1]
    ours = narrowgauge("eval", exported, "--task", f"hellaswag:{tmp_path / 'rails.jsonl'}")
    assert ours.code == 0, ours.err
    assert f"12 examples, acc {theirs}," in ours.out
