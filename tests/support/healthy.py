"""A machine without a GPU on which nothing is wrong; the tests of the doctor break one thing at a time."""

from narrowgauge.trainer.cluster.doctor.facts import Disk, Facts, Hub

CPU_ONLY = Facts(
    python=(3, 12, 0),
    packages={"numpy": "2.1.0", "pydantic": "2.9.2"},
    torch="2.11.0",
    build="cpu",
    backends=("gloo",),
    system="Linux",
    machine="x86_64",
    glibc=(2, 39),
    cpu=frozenset({"avx2", "avx512f"}),
    cores=8,
    machine_cores=8,
    threads=None,
    open_files=(1 << 20, 1 << 20),
    locked_memory=(None, None),
    shared_memory=Disk(path="/dev/shm", size=32 << 30, free=32 << 30),
    now=1.8e9,
    installed=1.7e9,
    synchronized=True,
    cc="/usr/bin/gcc",
    cxx="/usr/bin/g++",
    compiler="g++ 13.2.0",
    environment={},
    disk=Disk(path=".", size=1 << 40, free=1 << 39, speed=1e9),
    cache=Disk(path="cache", size=1 << 40, free=1 << 39, speed=1e9),
    hub=Hub("huggingface.co answers"),
)
