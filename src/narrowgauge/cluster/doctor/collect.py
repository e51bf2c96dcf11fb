"""Reads the facts off this machine. It asks, writes one temporary file to each disk, and changes nothing."""

import os
import sys
from pathlib import Path

import torch

from narrowgauge.cluster.doctor.collect_gpus import collect_hardware
from narrowgauge.cluster.doctor.collect_host import collect_compiler, collect_disk, collect_system
from narrowgauge.cluster.doctor.collect_network import ask_hub
from narrowgauge.cluster.doctor.facts import Facts, Given, Software, release
from narrowgauge.data import cache_directory, is_corpus, load_tokenizer, open_corpus, split_sources
from narrowgauge.data.sources import open_source
from narrowgauge.data.sources.hub import PREFIX
from narrowgauge.data.token_files.source import token_files
from narrowgauge.data.tokenization.names import tokenizer_identity
from narrowgauge.errors import UserError
from narrowgauge.torch_compat import cuda_architectures


def collect(data: str | None = None, tokenizer: str | None = None) -> Facts:
    """The facts of this machine, and of the data and the tokenizer of these names."""
    software = collect_software()
    return Facts(
        software=software,
        hardware=collect_hardware(software.build),
        system=collect_system(),
        environment=dict(os.environ),
        disk=collect_disk(Path.cwd()),
        cache=collect_disk(cache_directory()),
        hub=ask_hub(),
        data=None if data is None else _data(data),
        tokenizer=None if tokenizer is None else _tokenizer(tokenizer),
        compiler=collect_compiler(),
    )


def collect_software() -> Software:
    """Python, torch, and what torch was built with."""
    distributed = torch.distributed
    backends: tuple[str, ...] = ()
    nccl: tuple[int, ...] = ()
    if distributed.is_available():
        known = {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}
        backends = tuple(name for name, is_there in known.items() if is_there())
    build = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    if build != "cpu" and "nccl" in backends:
        nccl = tuple(torch.cuda.nccl.version()[:3])
    return Software(
        python=tuple(sys.version_info[:3]),
        torch=torch.__version__,
        build=build,
        library=release(torch.version.hip or torch.version.cuda or "0.0"),
        architectures=cuda_architectures(),
        backends=backends,
        nccl=nccl,
    )


def _data(source: str) -> Given:
    """The kinds of the sources, none of which is prepared."""
    try:
        found = [_one_source(name) for name in split_sources(source)]
    except (UserError, OSError) as error:
        return Given(name=source, error=str(error))
    return Given(name=source, found="; ".join(found))


def _one_source(name: str) -> str:
    if name.startswith(PREFIX):
        return "a data set of the Hugging Face hub"
    folder = Path(name).expanduser()
    if is_corpus(folder):
        facts = open_corpus(folder).manifest
        return f"a prepared corpus, whole: {facts.train_tokens:,} tokens to train on"
    if files := token_files(name):
        train, val = files
        return f"token files: {len(train)} to train on, {len(val) or 'the tail of them'} held out"
    return f"text: {len(open_source(name).inputs):,} files"


def _tokenizer(name: str) -> Given:
    """The size of the tokenizer."""
    try:
        if tokenizer_identity(name) == name:
            return Given(name=name, found="needs no file")
        return Given(name=name, found=f"{load_tokenizer(Path(name).expanduser()).vocab_size:,} tokens")
    except (UserError, OSError) as error:
        return Given(name=name, error=str(error))
