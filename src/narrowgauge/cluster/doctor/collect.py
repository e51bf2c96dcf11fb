"""Reads the facts off this machine. It asks, writes one temporary file to each disk, and changes nothing."""

import os
from pathlib import Path

from narrowgauge.cluster.doctor.collect_gpus import collect_hardware
from narrowgauge.cluster.doctor.collect_host import collect_compiler, collect_disk, collect_system
from narrowgauge.cluster.doctor.collect_network import ask_hub
from narrowgauge.cluster.doctor.collect_software import collect_software
from narrowgauge.cluster.doctor.facts import Facts, Given
from narrowgauge.cluster.doctor.torch_setup.ask_torch import ask_torch
from narrowgauge.files import cache_directory


def collect(data: str | None = None, tokenizer: str | None = None) -> Facts:
    """The facts of this machine, and of the data and the tokenizer of these names."""
    torch = ask_torch()
    software = collect_software(torch)
    return Facts(
        software=software,
        hardware=collect_hardware(torch),
        system=collect_system(),
        environment=dict(os.environ),
        disk=collect_disk(Path.cwd()),
        cache=collect_disk(cache_directory()),
        hub=ask_hub(),
        data=_given("data", data, software.works),
        tokenizer=_given("tokenizer", tokenizer, software.works),
        compiler=collect_compiler(),
    )


def _given(what: str, name: str | None, torch_works: bool) -> Given | None:
    """What is known of data or a tokenizer; it takes the code that `train` has, and so torch."""
    if name is None:
        return None
    if not torch_works:
        return Given(name=name, error=f"{name}: not looked at; fix torch and the packages first (see above)")
    from narrowgauge.cluster.doctor.collect_given import collect_data, collect_tokenizer

    return collect_data(name) if what == "data" else collect_tokenizer(name)
