"""A rank of a small run that counts steps and fails on request.

    python coordinator_member.py RUN [KEY=VALUE ...]

steps=N        how many (2000); a step takes 10 ms
raise=R@S      rank R raises in step S: a ValueError, or what `error` names
hang_s=X       the run's patience
rendezvous_s=X how long to wait for missing ranks
wait=X         seconds between the first moment that a signal is noted and looking for the other ranks
"""

import os
import sys
import time
from pathlib import Path

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_whole
from narrowgauge.system.signals import Preempted, StoppedEarly, die_with_launcher, stop_requests
from narrowgauge.trainer.checkpoint import lock_run
from narrowgauge.trainer.distributed import Coordinator, StoppedByPeer, init_process_group, world_from

ERRORS = {"value": ValueError, "user": UserError, "memory": MemoryError}


def is_due(coordinator: Coordinator, options: str | None, step: int) -> bool:
    who, _, when = (options or "").partition("@")
    return who in (str(coordinator.rank), "all") and int(when) == step


def steps(coordinator: Coordinator, run: Path, requests, options: dict[str, str]) -> None:
    weights = torch.ones(4)
    for step in range(1, int(options.get("steps", 2000)) + 1):
        coordinator.progress(f"step {step}")
        if is_due(coordinator, options.get("raise"), step):
            raise ERRORS[options.get("error", "value")](f"the trouble of step {step}")
        if coordinator.size > 1:
            torch.distributed.all_reduce(weights)
        time.sleep(0.01)
        asked = coordinator.all_reduce_max(asked=requests.number, rank=coordinator.rank)
        assert asked["rank"] == coordinator.size - 1
        (run / f"step-of-{coordinator.rank}").write_text(str(step))
        if asked["asked"]:
            if coordinator.rank == 0:
                write_whole(run / "saved", f"{step}\n")
            coordinator.barrier()
            raise Preempted(f"signal {asked['asked']} after step {step}")


def work(coordinator: Coordinator, run: Path, requests, options: dict[str, str]) -> None:
    def status(text: str) -> None:
        if coordinator.rank == 0:
            write_whole(run / "status", text)

    with lock_run(run, coordinator.rank, coordinator.barrier):
        coordinator.record_failures_in(
            run, lambda sentence: write_whole(run / "status", f"failed {sentence}")
        )
        assert coordinator.broadcast({"from": coordinator.rank}) == {"from": 0}
        requests.save_first()
        try:
            with coordinator.first_failure():
                steps(coordinator, run, requests, options)
            status("done")
        except (Preempted, StoppedEarly) as stop:
            status(f"preempted {stop}")
            raise
        except BaseException as error:
            status(f"failed {type(error).__name__}: {error}")
            raise


def main() -> int:
    die_with_launcher(os.environ)
    run, options = Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
    world = world_from(os.environ, gpus=0)
    hang_s, rendezvous_s = float(options.get("hang_s", 60)), float(options.get("rendezvous_s", 60))
    try:
        with stop_requests() as requests:
            (run / f"ready-{world.rank}").touch()
            time.sleep(float(options.get("wait", 0)))
            with init_process_group(world, torch.device("cpu"), hang_s, rendezvous_s) as coordinator:
                work(coordinator, run, requests, options)
    except (Preempted, StoppedEarly) as stop:
        print(f"rank: {stop}", file=sys.stderr)
        return 75
    except KeyboardInterrupt:
        return 1
    except StoppedByPeer as stop:
        if stop.is_printed:
            print(f"rank: {stop}", file=sys.stderr)
        return stop.code
    except UserError as error:
        print(f"rank: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
