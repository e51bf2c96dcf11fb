"""The verdicts on the launcher, ranks and cores: whether the processes of a run know of each other.

If a program is started eight times without the launcher's variables, each process trains the whole model, all
on one GPU: the *world of one*. The doctor detects this with the code that `train` uses, `distributed.world`,
so it refuses exactly what `train` refuses, in the same words.

In the shell of a Slurm batch script the doctor only warns. `train` is refused there, but it is where the
doctor is usually started, and nothing is wrong with the job.
"""

from collections.abc import Mapping

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cluster.doctor.facts import Facts, Verdict, of_error, ok, warn
from narrowgauge.trainer.distributed import NotStartedBySrun, World, world_from

_OTHERWISE = "start the processes with torchrun, and leave the variables to it"


def check_launch(facts: Facts) -> dict[str, Verdict]:
    """The verdicts by item; ranks are left out if the processes do not form a world."""
    launcher, world = _launcher(facts.environment)
    ranks = {"ranks": _ranks(facts, world)} if world else {}
    return {"launcher": launcher, **ranks, "cores": _cores(facts, world.local_size if world else 1)}


def _launcher(env: Mapping[str, str]) -> tuple[Verdict, World | None]:
    """The verdict on the world that the variables describe, and that world; None if `train` refuses it."""
    try:
        world = world_from(env, gpus=0)
    except UserError as error:
        status = "WARN" if isinstance(error, NotStartedBySrun) else "MISS"
        return of_error(status, str(error), _OTHERWISE), None
    return ok(_in_words(env, world)), world


def _in_words(env: Mapping[str, str], world: World) -> str:
    """The place of this process in its world, and the rendezvous address."""
    process = f"process {world.rank} of {world.size}" if world.size > 1 else "one process"
    told = "by torchrun's variables" if env.get("RANK") else "started by itself"
    job, tasks = env.get("SLURM_JOB_ID"), env.get("SLURM_NTASKS", "1")
    inside = f", in Slurm's job {job} of {tasks} task{'' if tasks == '1' else 's'}" if job else ""
    meeting = f"; all meet at {world.master_addr}:{world.master_port}" if world.size > 1 else ""
    return f"{process}, {told}{inside}{meeting}"


def _ranks(facts: Facts, world: World) -> Verdict:
    """The verdict on a world and the GPUs of this node."""
    local, gpus = world.local_size, len(facts.hardware.gpus)
    try:
        world_from(facts.environment, gpus)
    except UserError as error:
        return of_error("MISS", str(error), _OTHERWISE)
    if not gpus:
        return ok(f"{local} on this node, on the CPU")
    if local > gpus:
        return ok(f"{local} on this node; this one was given a GPU to itself")
    if 1 < local < gpus:
        return warn(f"{local} on this node, {gpus} GPUs", f"start {gpus} to use every GPU")
    if local < gpus:
        return ok(f"1 on this node, which uses one of {gpus} GPUs")
    return ok(f"{local} on this node, one to each GPU")


def _cores(facts: Facts, local: int) -> Verdict:
    """The verdict on the cores of this process, one of `local` on its node."""
    system = facts.system
    found = f"{system.cores} of {system.machine_cores}"
    if system.cores == 1 < system.machine_cores:
        return warn(
            f"{found}: this process may use a single one, for Python, data and the GPU's queue",
            "ask the launcher for more (srun --cpus-per-task 8, mpirun --bind-to none)",
        )
    threads = system.threads
    enough = max(1, min(system.cores, system.machine_cores // local))
    if threads and threads > enough:
        return warn(
            f"{found}; {local} process{'es' * (local > 1)} of OMP_NUM_THREADS={threads}",
            f"OMP_NUM_THREADS={enough}: more threads than cores take turns",
        )
    return ok(f"{found}" + (f", OMP_NUM_THREADS={threads}" if threads else ""))
