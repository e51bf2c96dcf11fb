"""The machine around the GPUs: processes, limits, shared memory, clock, disks and compilers.

The bounds are judgements; `limits.toml` gives the reason of each.

If a program is started eight times without the launcher's variables, each process trains the whole model, all
on one GPU: the *world of one*. The doctor detects this with the code that `train` uses, `distributed.world`,
so it refuses exactly what `train` refuses, in the same words. In the shell of a Slurm batch script it only
warns. `train` is refused there, but it is where the doctor is usually started, and nothing is wrong with the
job.
"""

import re

from narrowgauge.system.errors import UserError
from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.cluster.doctor.facts import LIMITS, Disk, Facts, Verdict, miss, ok, verdict_of, warn
from narrowgauge.trainer.distributed import NotStartedBySrun, World, world_from


def _world(facts: Facts, gpus: int = 0) -> World | Verdict:
    """The world that the variables describe, or the verdict in the words with which `train` refuses it."""
    try:
        return world_from(facts.environment, gpus)
    except UserError as error:
        status = warn if isinstance(error, NotStartedBySrun) and not gpus else miss
        return verdict_of(status, error, "start the processes with torchrun, and leave the variables to it")


def launcher(facts: Facts) -> Verdict:
    """The verdict on the world that the variables describe: this process's place, and where all meet."""
    world, env = _world(facts), facts.environment
    if isinstance(world, Verdict):
        return world
    process = f"process {world.rank} of {world.size}" if world.size > 1 else "one process"
    told = "by torchrun's variables" if env.get("RANK") else "started by itself"
    job, tasks = env.get("SLURM_JOB_ID"), env.get("SLURM_NTASKS", "1")
    inside = f", in Slurm's job {job} of {tasks} task{'s' * (tasks != '1')}" if job else ""
    meeting = f"; all meet at {world.master_addr}:{world.master_port}" if world.size > 1 else ""
    return ok(f"{process}, {told}{inside}{meeting}")


def ranks(facts: Facts) -> Verdict | None:
    """The verdict on a world and the GPUs of this node; None if the processes do not form a world."""
    gpus, alone = len(facts.gpus), _world(facts)
    if isinstance(alone, Verdict):
        return None
    world, local = _world(facts, gpus), alone.local_size
    if isinstance(world, Verdict):
        return world
    found = f"{local} on this node"
    if not gpus:
        return ok(f"{found}, on the CPU")
    if local > gpus:
        return ok(f"{found}; this one was given a GPU to itself")
    if 1 < local < gpus:
        return warn(f"{found}, {gpus} GPUs", f"start {gpus} to use every GPU")
    return ok(f"{found}, which uses one of {gpus} GPUs" if local < gpus else f"{found}, one to each GPU")


def cores(facts: Facts) -> Verdict:
    """The verdict on the cores of this process and of others on its node."""
    world, threads = _world(facts), facts.threads
    local = 1 if isinstance(world, Verdict) else world.local_size
    found = f"{facts.cores} of {facts.machine_cores}"
    if facts.cores == 1 < facts.machine_cores:
        return warn(
            f"{found}: this process may use a single one, for Python, data and the GPU's queue",
            "ask the launcher for more (srun --cpus-per-task 8, mpirun --bind-to none)",
        )
    enough = max(1, min(facts.cores, facts.machine_cores // local))
    if threads and threads > enough:
        return warn(
            f"{found}; {local} process{'es' * (local > 1)} of OMP_NUM_THREADS={threads}",
            f"OMP_NUM_THREADS={enough}: more threads than cores take turns",
        )
    return ok(f"{found}" + (f", OMP_NUM_THREADS={threads}" if threads else ""))


def open_files(facts: Facts) -> Verdict:
    """The verdict on the limit of open files."""
    (soft, hard), enough = facts.open_files, LIMITS["open_files"]["enough"]
    if soft is None or soft >= enough:
        return ok("unlimited" if soft is None else f"{soft:,}")
    if hard is None or hard >= enough:
        return warn(f"{soft:,}", f"ulimit -n {min(hard or 65536, 65536)}")
    return warn(
        f"{soft:,}, and the user may not raise it beyond {hard:,}",
        "let the administrator raise nofile in /etc/security/limits.conf (docker run --ulimit nofile=65536)",
    )


def locked_memory(facts: Facts) -> Verdict:
    """The verdict on the limit of locked memory."""
    soft = facts.locked_memory[0]
    if soft is None:
        return ok("unlimited")
    if facts.fabric:
        return warn(
            f"{human_bytes(soft)}, and the machine has InfiniBand, whose buffers are locked",
            "ulimit -l unlimited, or memlock in /etc/security/limits.conf (docker run --ulimit memlock=-1); "
            "under Slurm, PropagateResourceLimitsExcept=MEMLOCK",
        )
    return ok(f"{human_bytes(soft)}; only InfiniBand needs more, and there is none")


def shared_memory(facts: Facts) -> Verdict:
    """The verdict on the shared memory."""
    shared, bounds = facts.shared_memory, LIMITS["shared_memory"]
    if facts.system != "Linux":
        return ok("not a file system here")
    if shared is None:
        return warn("there is no /dev/shm", "mount a tmpfs there: mount -t tmpfs tmpfs /dev/shm")
    found = f"{human_bytes(shared.free)} free of {human_bytes(shared.size)} in /dev/shm"
    if shared.error:
        return miss(f"{found}: {shared.error}", "chmod 1777 /dev/shm")
    if shared.free >= bounds["enough"]:
        return ok(found)
    fix = "docker run --shm-size 16g, or --ipc host; else mount -o remount,size=16G /dev/shm"
    if shared.size >= bounds["enough"]:
        fix = "remove what killed programs left there"
    return (miss if shared.free < bounds["least"] else warn)(found, fix)


def clock(facts: Facts) -> Verdict:
    """The verdict on the clock, by the hub's, the disks' and the kernel's word."""
    set_it = "sudo sntp -sS time.apple.com" if facts.system == "macOS" else "timedatectl set-ntp true"
    if facts.now < facts.installed - 86400:  # a day of slack: wheels carry local times
        return miss(
            "before the day this package was installed",
            f"set the clock ({set_it}): certificates and 'newest' depend on it",
        )
    ahead = facts.hub.ahead
    if ahead is not None and abs(ahead) > LIMITS["clock"]["machine"]:
        return warn(f"{_off(ahead)} the hub's", set_it)
    for disk in (facts.disk, facts.cache):
        if disk.skew is not None and abs(disk.skew) > LIMITS["clock"]["file_server"]:
            return warn(
                f"{_off(disk.skew)} that of the file system at {disk.path}",
                "let this machine and the file server follow the same time server (NTP)",
            )
    found = "plausible" + (", agrees with the hub's" if ahead is not None else "")
    if facts.synchronized is not False:
        return ok(found + (", synchronized" if facts.synchronized else ""))
    if facts.environment.get("SLURM_NNODES", "1") == "1":
        return ok(f"{found}; not known to the kernel to be synchronized")
    return warn(
        f"{found}; the kernel does not know it to be synchronized",
        "run chrony or ntpd on every node, so that their logs can be compared",
    )


def _off(ahead: float) -> str:
    """The error of this clock, given by how many seconds the other clock is ahead."""
    return f"{abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'}"


def disk(disk: Disk, elsewhere: str) -> Verdict:
    """The verdict on a disk; the fix is `elsewhere`, an instruction for choosing another disk."""
    bounds, kind = LIMITS["disk"], f" ({disk.kind})" if disk.kind else ""
    if disk.error:
        return warn(f"{disk.path}{kind}: {disk.error}", elsewhere)
    found = f"{disk.path}{kind}: {human_bytes(disk.free)} free of {human_bytes(disk.size)}"
    if disk.speed:
        found += f", writes {disk.speed / 1e6:,.0f} MB/s"
    if disk.inodes and disk.inodes_free is not None:
        share, fix = disk.inodes_free / disk.inodes, f"remove small files, or {elsewhere}"
        if disk.inodes_free < bounds["least_inodes"]:
            return miss(f"{found}, {disk.inodes_free} inodes free", fix)
        if share < bounds["inodes_share"]:
            return warn(f"{found}, {share:.1%} of the inodes free", fix)
    if disk.free < bounds["least"]:
        return miss(found, f"make room, or {elsewhere}")
    if disk.free < max(bounds["enough"], min(bounds["plenty"], (1 - bounds["full"]) * disk.size)):
        return warn(found, f"make room, or {elsewhere}")
    if disk.speed and disk.speed < bounds["slow"]:
        return warn(found, f"{elsewhere} (a faster file system): every save waits for this one")
    return ok(found)


def compiler(facts: Facts) -> Verdict:
    """The verdict on the compilers."""
    triton = f", Triton {facts.triton}" if facts.triton else ""
    if not facts.cc:
        on_cpu = "casts on a CPU take 2 to 4 times as long without it"
        why = "kernels on a GPU need it" if facts.gpus else on_cpu
        return warn(
            f"{facts.compiler or facts.compiler_error or 'no C compiler'}{triton}",
            f"install gcc and g++, or clang, or name them in CC and CXX: {why}; training.compile needs both",
        )
    if not facts.cxx:
        return warn(
            f"{facts.compiler_error or 'no C++ compiler'}{triton}",
            "install g++ or clang++, or name one in CXX: training.compile needs it; nothing else does",
        )
    found = f"{facts.compiler or facts.cxx}{triton}"
    if error := facts.compiler_error:
        fix = "fix the compiler, or name another in CXX: training.compile needs one"
        if "Python.h" in error:
            fix = "install Python's headers (python3-dev or python3-devel): training.compile needs them"
        elif re.search(r"openmp|omp\.h|lg?omp", error):
            how = "brew install libomp" if facts.system == "macOS" else "libomp-dev, or take g++"
            fix = f"install OpenMP for this compiler ({how}): training.compile needs it"
        return warn(f"{found}: {error}", fix)
    if facts.gpus and not facts.triton:
        how = "pip install triton"
        if any(gpu.maker == "amd" for gpu in facts.gpus):  # the package of that name is for NVIDIA's
            how = "install torch's ROCm build again, which brings its own Triton, not the package `triton`"
        return warn(f"{found}, no Triton", f"{how}: kernels and training.compile need it on a GPU")
    return ok(found)
