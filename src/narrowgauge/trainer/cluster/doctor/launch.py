"""The verdicts on the launcher, ranks and cores: whether the processes of a run know of each other.

If a program is started eight times without the launcher's variables, each process trains the whole model, all
on one GPU: the *world of one*. The doctor detects this with the code that `train` uses, `distributed.world`,
so it refuses exactly what `train` refuses, in the same words.

In the shell of a Slurm batch script the doctor only warns. `train` is refused there, but it is where the
doctor is usually started, and nothing is wrong with the job.
"""

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cluster.doctor.facts import Facts, Verdict, of_error, ok, warn
from narrowgauge.trainer.distributed import NotStartedBySrun, World, world_from

_OTHERWISE = "start the processes with torchrun, and leave the variables to it"


def launcher(facts: Facts) -> Verdict:
    """The verdict on the world that the variables describe: this process's place, and where all meet."""
    world, env = _world(facts), facts.environment
    if isinstance(world, UserError):
        status = "WARN" if isinstance(world, NotStartedBySrun) else "MISS"
        return of_error(status, str(world), _OTHERWISE)
    process = f"process {world.rank} of {world.size}" if world.size > 1 else "one process"
    told = "by torchrun's variables" if env.get("RANK") else "started by itself"
    job, tasks = env.get("SLURM_JOB_ID"), env.get("SLURM_NTASKS", "1")
    inside = f", in Slurm's job {job} of {tasks} task{'s' * (tasks != '1')}" if job else ""
    meeting = f"; all meet at {world.master_addr}:{world.master_port}" if world.size > 1 else ""
    return ok(f"{process}, {told}{inside}{meeting}")


def _world(facts: Facts, gpus: int = 0) -> World | UserError:
    """The world that the variables describe, or the error with which `train` refuses it."""
    try:
        return world_from(facts.environment, gpus)
    except UserError as error:
        return error


def ranks(facts: Facts) -> Verdict | None:
    """The verdict on a world and the GPUs of this node; None if the processes do not form a world."""
    gpus, alone = len(facts.gpus), _world(facts)
    if isinstance(alone, UserError):
        return None
    world, local = _world(facts, gpus), alone.local_size
    if isinstance(world, UserError):
        return of_error("MISS", str(world), _OTHERWISE)
    if not gpus:
        return ok(f"{local} on this node, on the CPU")
    if local > gpus:
        return ok(f"{local} on this node; this one was given a GPU to itself")
    if 1 < local < gpus:
        return warn(f"{local} on this node, {gpus} GPUs", f"start {gpus} to use every GPU")
    if local < gpus:
        return ok(f"1 on this node, which uses one of {gpus} GPUs")
    return ok(f"{local} on this node, one to each GPU")


def cores(facts: Facts) -> Verdict:
    """The verdict on the cores of this process and of others on its node."""
    world = _world(facts)
    local = 1 if isinstance(world, UserError) else world.local_size
    found = f"{facts.cores} of {facts.machine_cores}"
    if facts.cores == 1 < facts.machine_cores:
        return warn(
            f"{found}: this process may use a single one, for Python, data and the GPU's queue",
            "ask the launcher for more (srun --cpus-per-task 8, mpirun --bind-to none)",
        )
    threads = facts.threads
    enough = max(1, min(facts.cores, facts.machine_cores // local))
    if threads and threads > enough:
        return warn(
            f"{found}; {local} process{'es' * (local > 1)} of OMP_NUM_THREADS={threads}",
            f"OMP_NUM_THREADS={enough}: more threads than cores take turns",
        )
    return ok(f"{found}" + (f", OMP_NUM_THREADS={threads}" if threads else ""))
