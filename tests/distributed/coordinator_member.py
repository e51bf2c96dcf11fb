"""A rank of a small run: python crew_member.py RUN [KEY=VALUE ...]; it counts steps, and fails as it is told.

steps=N        how many (2000); a step takes 10 ms
raise=R@S      rank R raises in step S: a ValueError, or what `error` names
hang=R@S       rank R never leaves step S
hang_s=X       the run's patience
meet_s=X       how long to wait for missing ranks
"""

import os
import sys
import time
from pathlib import Path

import torch

from narrowgauge.checkpoint import lock_run, write_whole
from narrowgauge.distributed import Crew, Stopped, joined, world_from
from narrowgauge.errors import UserError
from narrowgauge.signals import Preempted, StoppedEarly, die_with_launcher, stop_requests

ERRORS = {"value": ValueError, "user": UserError, "memory": MemoryError}


def is_due(crew: Crew, told: str | None, step: int) -> bool:
    who, _, when = (told or "").partition("@")
    return who in (str(crew.rank), "all") and int(when) == step


def steps(crew: Crew, run: Path, requests, told: dict[str, str]) -> None:
    weights = torch.ones(4)
    for step in range(1, int(told.get("steps", 2000)) + 1):
        crew.at(f"step {step}")
        if is_due(crew, told.get("raise"), step):
            raise ERRORS[told.get("error", "value")](f"the trouble of step {step}")
        while is_due(crew, told.get("hang"), step):
            time.sleep(1)
        if crew.size > 1:
            torch.distributed.all_reduce(weights)
        time.sleep(0.01)
        asked = crew.agree(asked=requests.number, rank=crew.rank)
        assert asked["rank"] == crew.size - 1
        (run / f"step-of-{crew.rank}").write_text(str(step))
        if asked["asked"]:
            if crew.rank == 0:
                write_whole(run / "saved", f"{step}\n")
            crew.meet()
            raise Preempted(f"signal {asked['asked']} after step {step}")


def work(crew: Crew, run: Path, requests, told: dict[str, str]) -> None:
    def status(text: str) -> None:
        if crew.rank == 0:
            write_whole(run / "status", text)

    with lock_run(run, crew.rank, crew.meet):
        (run / f"pid-of-{crew.rank}").write_text(str(os.getpid()))
        crew.keep_records_in(run, lambda sentence: write_whole(run / "status", f"failed {sentence}"))
        assert crew.share({"from": crew.rank}) == {"from": 0}
        if "early" not in told:
            requests.save_first()
        try:
            with crew.one_cause():
                steps(crew, run, requests, told)
            status("done")
        except (Preempted, StoppedEarly) as stop:
            status(f"preempted {stop}")
            raise
        except BaseException as error:
            status(f"failed {type(error).__name__}: {error}")
            raise


def main() -> int:
    die_with_launcher(os.environ)
    run, told = Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
    world = world_from(os.environ, gpus=0)
    hang_s, meet_s = float(told.get("hang_s", 60)), float(told.get("meet_s", 60))
    try:
        with stop_requests() as requests:
            requests.nothing_to_save()
            with joined(world, torch.device("cpu"), hang_s, meet_s) as crew:
                work(crew, run, requests, told)
    except (Preempted, StoppedEarly) as stop:
        print(f"crew: {stop}", file=sys.stderr)
        return 75
    except KeyboardInterrupt:
        return 1
    except Stopped as stop:
        if stop.speaks:
            print(f"crew: {stop}", file=sys.stderr)
        return stop.code
    except UserError as error:
        print(f"crew: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
