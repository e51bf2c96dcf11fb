"""A mistake is one sentence that names the thing, exit code 2, and nothing is trained."""

import os
import shlex
import signal

import pytest

# Words after `narrowgauge`, and what the sentence has to say. {run} is a finished run, {dir} a folder of the
# files below; {new} and {none} are not there; {text} is the corpus.
LINES = [
    ("trian", "unknown verb 'trian'", "'train'"),
    ("pretrain", "unknown verb 'pretrain'", "known: advise, plan"),
    ("--recipe fp8", "'--recipe'", "narrowgauge train --recipe"),
    ("--dry-run", "'--dry-run'", "a verb comes first"),
    ("train --recipe.rounding stochastic", "'--recipe.rounding'", "key of a cast", ".fprop.x '{{cast ="),
    ("train --recipe.title mine", "'--recipe.title'", "recipe file"),
    ("sample {run} --prompt x --checkpoint 7", "'--checkpoint'"),
    ("train -steps 3", "unknown option '-steps'", "'--steps'"),
    ("train --zero-stage 3", "unknown option '--zero-stage'"),
    ("train --every 10", *(f"--{s}.every" for s in ("validation", "checkpoint", "gauges", "log"))),
    ("train --outliers 0.99", "no option --outliers", "it is a key of a cast"),
    ("train --training.lr 1", "unknown option '--training.lr'; it is --optimizer.lr"),
    ("train --fprop.x {{cast = fp4-row, outliers = 0.99}}", "'fp4-row,'", "single quotes"),
    # A misspelt option, and not the one that seems to be missing.
    ("search runs/x --formats mxfp4 --budgte 0.6 --out m", "'--budgte'; the nearest is '--budget'"),
    ("train --profile 0", "argument --profile: '0' is not a whole number above 0"),
    ("train -s 3", "unknown option '-s'", "the nearest is '--steps'"),
    ("recipes fp8 bf16", "unknown argument 'bf16'", "NAME", "recipes --help"),
    ("doctor here", "unknown argument 'here'", "takes none", "doctor --help"),
    ("train help", "configuration file help does not exist", "name a .toml file"),
    ("prepare {text} --out {new} --workers all", "--workers", "'all' is not a whole number"),
    ("sample {run} --prompt x --top-p much", "'much' is not a number"),
    ("train --out ''", "--out", "the name is empty"),
    ("train ''", "CONFIG.toml", "the name is empty"),
    ("export {run} --to hf --out /proc/none", "/proc/none", "cannot be written", "--out"),
    ("train --branch {run} --steps 9 --recipe bf16 --out /proc/none", "/proc/none", "cannot be written"),
    ("train --branch /no/such", "/no/such", "config.toml"),
    ("formats fp8", "unknown format 'fp8'", "e4m3 and e5m2"),
    ("formats float8_e4m3fn", "'float8_e4m3fn'", "the nearest is 'e4m3'"),
    ("eval {run} --prompt x", "'--prompt'; sample has it, eval does not"),
    ("eval {run} --lr 1", "'--lr'; plan, train, compare", "eval does not"),
    ("eval {run} --seq-len 0", "--sequence-length: '0' is not a whole number above 0"),
    ("export {run} --to vllm --out {new}", "unknown format 'vllm'", "compressed-tensors, modelopt or hf"),
    ("export {run} --to llama.cpp --out {new}", "unknown format 'llama.cpp'", "takes what it reads: gguf"),
    ("export {run} --to torchao --out {new}", "unknown format 'torchao'", "recipes NAME --to torchao"),
    ("export {run} --to onnx --out {new}", "unknown format 'onnx'", "hf"),
    ("export {run} --to llmc --out {new}", "positions = learned", "--to hf"),
    ("export {run} --to hf --out {run}", "there already", "--out"),
    ("export {run} --to hf --out {new} --dtype int8", "unknown dtype 'int8'"),
    ("export {run} --to hf", "--out"),
    ("import {none} --out {new}", "does not exist", "Hugging Face"),
    ("import {run} --out {new}", "is already a run", "--model.weights"),
    ("train --recipe.fprop.q bf16", "'--recipe.fprop.q'", "'--recipe.fprop.x'"),
    ("train --steps", "--steps", "expected one argument"),
    ("sample --prompt x", "RUN", "narrowgauge sample --help"),
    ("sample {none} --prompt x", "{none}", "not a run directory"),
    ("sample {dir}/good.toml --prompt x", "{dir}/good.toml", "is not a model file"),
    ("sample {run} --prompt x --top-p 0", "top_p = 0.0"),
    ("sample {run} --prompt x --seed 99999999999999999999", "seed = 99999"),
    ("sample {run} --prompt \udcff", "U+DCFF"),
    ("eval {run} --task vla", "unknown task 'vla'", "'val'", "hellaswag:FILE"),
    ("eval {run} --task hellaswag:{none}", "cannot be read"),
    ("report {run} {none}", "{none}", "is not a run"),
    ("report {run} --out {dir}", "{dir}", "is a directory"),
    ("report {run} --out {dir}/good.toml/x", "cannot write"),
    ("runs {none}", "none does not exist; name a folder"),
    ("recipes mxpf4", "unknown recipe 'mxpf4'", "'mxfp4'"),
    ("recipes {dir}/good.tml", "write {dir}/good.toml, which is there"),
    ("recipes {dir}/gooood.toml", "the nearest is {dir}/good.toml"),
    ("recipes --device rtx490", "unknown device 'rtx490'; the nearest are rtx4090"),
    ("recipes --diff fp8", "--diff is about one recipe, and none is named"),
    ("recipes --to te", "--to is about one recipe, and none is named"),
    ("recipes fp8 --to torcha", "unknown target 'torcha'; the nearest is 'torchao'"),
    ("recipes fp8-row --to te", 'block = "row", where te has "tensor"'),
    ("recipes --from te", "--from reads a file of another tool, and none is named"),
    ("recipes fp8 --from te", "fp8 cannot be read"),
    ("recipes fp8 --from qwix", "unknown source 'qwix'"),
    ("recipes nvfp4 --to megatron", "give the number of blocks with --blocks N"),
    ("train gpt2-124", "does not exist; the nearest is gpt2-124m"),
    ("train {dir}/goood.toml", "{dir}/goood.toml", "good.toml"),
    ("train {dir}", "{dir}", "is a directory", "name a .toml file"),
    ("train {dir}/binary.txt", "{dir}/binary.txt", "cannot be read"),
    ("watch {dir} --once", "{dir} has no runs", "a run directory"),
    ("watch {dir}/good.toml", "good.toml is a file; name a run"),
    ("watch {none}/run", "{none} does not exist; name a run directory"),
    ("prepare {text} --out {new} --workers 0", "--workers 0 must be at least 1"),
    ("prepare {text} --out {new} --val-fraction 1", "held-out share 1.0 must be between 0 and 1"),
    ("prepare {text} --out {new} --layout mega", "unknown layout 'mega'; the nearest is 'megatron'"),
    ("prepare {text} --out {new} --dedupe", "unknown option '--dedupe'; the nearest is '--dedup'"),
    ("scaling", "--procs ''", "as in 1,2,4"),
    ("scaling --procs 2,1", "--procs '2,1'", "ascending"),
    ("scaling --procs 1 --seconds 0", "--seconds 0", "above 0"),
    ("scaling --procs 1,3 --device cpu", "training.batch_size = 8", "set --training.batch_size 9"),
    ("scaling --procs 1,2 --parallel.tensor 2 --device cpu", "--procs 1", "multiples of 2"),
    ("scaling --procs 1 --device cpu --out {dir}/good.toml/x", "good.toml/x", "cannot be written"),
]

FILES = {
    "good.toml": b"[training]\nsteps = 1\n",
    "binary.txt": bytes(range(128, 256)) * 40,
    "brief/a.txt": b"coal\n",
    "brief/b.txt": b"steam\n",
    "recipe.toml": b"[fprop]\nx = {cast = 'mxfp4', hadamard = 'many'}\n",
    "empty.toml": b"",
    "rounding.toml": b"fprop = 'mxfp4'\nrounding = 'stochastic'\n",
    "json.toml": b'{"fprop": "mxfp4"}',
    "no-quotes.toml": b"compute = 'bf16'\nfprop = mxfp4\n",
}

# A key over the tiny run's, its value, and what the sentence has to say; tests/data/ has each kind of text.
KEYS = [
    ("model.name", "gpt2-124", "unknown model 'gpt2-124'", "'gpt2-124m'"),
    ("model.name", "{dir}/good.toml", "{dir}/good.toml", "configuration file"),
    ("model.heads", 3, "model.dim = 32", "model.heads = 3"),
    ("model.layers", 10**9, "parameters", "GiB", "smaller --model"),
    ("model.vocab_size", 256, "up to 256", "model.vocab_size = 256", "--model.vocab_size 257"),
    ("recipe.name", "mxpf4", "unknown recipe 'mxpf4'", "'mxfp4'"),
    ("recipe.name", "{dir}/none.toml", "{dir}/none.toml", "does not exist"),
    ("recipe.name", "{dir}/recipe.toml", "fprop.x", "hadamard = 'many'"),
    ("recipe.name", "{dir}/empty.toml", "{dir}/empty.toml", "is empty"),
    ("recipe.name", "{dir}/rounding.toml", "'rounding'", "key of a cast", "fprop.x = {{cast ="),
    ("recipe.name", "{dir}/good.toml", "'training'", "configuration"),
    ("recipe.name", "{dir}/json.toml", "{dir}/json.toml", "it is JSON"),
    ("recipe.name", "{dir}/no-quotes.toml", "{dir}/no-quotes.toml", "fprop = mxfp4", "in quotes"),
    ("recipe.name", "{dir}", "{dir}", "is a directory", ".toml"),
    ("recipe.name", "fp8,bf16", "'fp8,bf16'", "one recipe", "narrowgauge compare"),
    ("recipe.name", "e4m3", "unknown recipe 'e4m3'", "a cast", "--recipe.fprop.x e4m3"),
    ("recipe.name", "{dir}/good", "'{dir}/good'", "{dir}/good.toml"),
    ("recipe.wgrad", "mxpf4", "'wgrad.dy'", "unknown cast 'mxpf4'", "'mxfp4'"),
    ("recipe.backend", "native", "'fp8'", "--backend emulated"),
    ("training.device", "gpu", "unknown device 'gpu'", "is 'cuda'"),
    ("training.device", "cuda:99", "cuda:99"),
    ("training.steps", 0, "training.steps = '0'", "greater than or equal to 1"),
    ("training.seed", -1, "training.seed = '-1'"),
    ("training.micro_batch_size", 3, "batch_size = 2", "micro_batch_size = 3"),
    ("training.batch_size", 10**30, "training.batch_size", "less than"),
    pytest.param(("training.memory_limit", "10KB", "limit is 10KB"), marks=pytest.mark.tier("thorough")),
    (
        "training.graph",
        "on",
        "training.graph = true, but graphs are recorded on a GPU, and this run is on a CPU",
    ),
    ("optimizer.lr", "nan", "optimizer.lr = 'nan'", "finite"),
    ("optimizer.betas", "0.9", "optimizer.betas = '0.9'", "0.9,0.95"),
    ("parallel.tensor", 2, "tensor 2", "torchrun --standalone --nproc-per-node 2 -m narrowgauge train"),
    ("data.source", "{run}", "{run}", "is a run directory"),
    ("data.source", "no/such/dir", "no/such/dir", "does not exist"),
    ("data.source", "/dev/null", "/dev/null", "neither a file nor a directory"),
    ("data.source", "{dir}/binary.txt", "{dir}/binary.txt", "not UTF-8"),
    ("data.source", "{dir}/brief", "tokens", "sequence of 32", "33"),
    ("data.tokenizer", "byte", "unknown tokenizer 'byte'", "'bytes'"),
    ("data.tokenizer", "x" * 5000, "File name too long"),
    ("log.prompt", "\udcff", "log.prompt", "UTF-8"),
]

TOML = [
    ("[training]\nsteps = = 3", "line 2"),
    ("[trainin]\nsteps = 3", "unknown section 'trainin'", "'training'"),
    ("[training]\nstep = 3", "unknown key 'training.step'", "'training.steps'"),
    ("[training]\nlr = 3", "it is optimizer.lr"),
    ("[recipe]\nfprop = {q = 'bf16'}", "unknown key 'recipe.fprop.q'"),
    ("steps = 3", "steps = 3", "outside", "[training]"),
    ("learning_rate = 1e-3", "learning_rate = 0.001", "[optimizer]", "lr"),
    ("every = 3", "every = 3", "[validation]", "[checkpoint]"),
    ("stepz = 3", "unknown key 'stepz'", "'steps'", "[training]"),
    ("name = 'mine'\nfprop = 'mxfp4'", "is a recipe", "--recipe"),
    ("recipe = 'mxfp4'", "recipe = 'mxfp4'", "[recipe]", 'name = "mxfp4"'),
    ("[training]\nbatch_size = true", "training.batch_size = True", "number"),
    ('{"training": {"steps": 3}}', "it is JSON", "[training]"),
    ("training:\n  steps: 3", "line 1", "'training:'", "it is YAML"),
    ("[recipe]\nname = mxfp4", "line 2", "'name = mxfp4'", "in quotes"),
    ("[training]\nsteps = 1,000", "line 2", "'steps = 1,000'", "1_000"),
    ("[log]\nprompt = None", "line 2", "leave the key out"),
    ("[training]\nsteps = 1\nsteps = 2\n", "line 3", "'steps = 2'"),
    ("training = 3", "training = 3", "[training]"),
    ("[data]\nsource = 3", "data.source = 3", "string"),
    ("[recipe]\n'fprop.x' = 3", "'fprop.x' = 3", "cast"),
    ("[recipe]\n'fprop.x' = {cast = 3}", "'fprop.x'", "cast = 3"),
    ("[recipe]\n'fprop.x' = {cast = 'e4m3', blok = 3}", "unknown cast key 'blok'"),
]


@pytest.fixture
def fill(finished, text, tmp_path):
    """Replace {run}, {dir} and the others in words."""
    there = tmp_path / "there"
    for name, content in FILES.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)
    places = {"run": finished, "dir": there, "text": text, "new": tmp_path / "new", "none": tmp_path / "none"}
    return lambda words: [str(word).format(**places) for word in words]


@pytest.mark.parametrize("case", LINES, ids=lambda case: ascii(case[0]))
def test_a_line(command, refused, fill, tmp_path, case):
    refused(command(*fill(shlex.split(case[0]))), *fill(case[1:]))
    assert os.listdir(tmp_path) == ["there"]


@pytest.mark.parametrize("case", KEYS, ids=lambda case: ascii(f"{case[0]} {case[1]}"[:40]))
def test_a_value(command, refused, line, fill, tmp_path, case):
    key, value, *says = case
    ended = command(*line({key: fill([value])[0]}), "--out", tmp_path / "run")
    refused(ended, *fill(says))
    assert not (tmp_path / "run").exists(), "the directory is not taken for a run that cannot be"


@pytest.mark.parametrize("case", TOML, ids=lambda case: case[0])
def test_a_file(command, refused, tmp_path, case):
    (tmp_path / "mine.toml").write_text(case[0])
    # A key of the line in the section that the file spoils must not hide it.
    line = ("train", tmp_path / "mine.toml", "--steps", "1", "--device", "cpu", "--out", tmp_path / "run")
    refused(command(*line), *case[1:])
    assert not (tmp_path / "run").exists()


PLACES = {
    "is a file, but a run needs a directory": lambda out: out.touch(),
    "File exists": lambda out: out.symlink_to("/proc/none"),
    "holds 'thesis.tex' and no config.toml": lambda out: (out.mkdir(), (out / "thesis.tex").touch()),
    "and now it is 0": lambda out: (out.mkdir(), (out / "config.toml").write_text("[training]\nseed = 7\n")),
    "cannot be read: Invalid value (at line 1": lambda out: (
        out.mkdir(),
        (out / "config.toml").write_text("steps = = 3"),
    ),
}


@pytest.mark.parametrize("says", PLACES)
def test_a_place_that_is_taken_or_damaged(command, refused, line, tmp_path, says):
    def content():
        return [(p.name, p.read_text()) for p in out.glob("[!.]*")] if out.is_dir() else out.is_file()

    out = tmp_path / "run"
    PLACES[says](out)
    before = content()
    refused(command(*line(), "--out", out), out, says)
    assert content() == before


def test_a_place_that_cannot_be_written(command, refused, line, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "run", "/proc/run"):
        refused(command(*line(), "--out", out), out, "cannot be made")


@pytest.mark.tier("thorough")
def test_a_run_that_another_process_holds(narrowgauge, refused, line, look, tmp_path):
    words = [*line({"training.steps": 10_000}), "--out", tmp_path / "run"]
    holder = narrowgauge.start(*words).until(look(tmp_path / "run").has_step(1))
    second = narrowgauge(*words)
    holder.send(signal.SIGTERM)
    assert holder.wait().code == 75
    run = look(tmp_path / "run")
    assert run.column("step") == list(range(1, len(run.steps) + 1)), "the second one changed nothing"
    (run.path / "metrics.jsonl").unlink()
    refused(second, run.path, f"in use by process {holder.pid} ")
