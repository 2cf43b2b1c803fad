"""Saves the binding of a rank as the kernel reports it.

`bound.py OUT MODE ROOT` binds the rank as the trainer does; `--plugin tests.ranks.bound`, BOUND=OUT, looks at
one that trains.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.pinning import bind


def cpus_of_threads() -> list[str]:
    """Return the CPUs that the kernel lets each thread of this process run on."""
    status = [(task / "status").read_text().splitlines() for task in Path("/proc/self/task").iterdir()]
    return [line.split()[1] for lines in status for line in lines if line.startswith("Cpus_allowed_list")]


def save(out: str, found: dict[str, object]) -> None:
    """Save what was found on this rank."""
    import torch

    torch.save(found, Path(out, f"rank_{read_launch_env().rank}.pt"))


def main(out: str, mode: str, root: Path) -> None:
    """Bind this rank, start threads, and save its binding."""
    binding = bind(mode, root=root)

    import torch  # after bind, as in the trainer

    from horovod_volo.cluster.world import World, rank_resources

    world = World.connect(binding)
    rank_resources(world)
    end = threading.Event()
    threading.Thread(target=end.wait).start()
    torch.randn(512, 512) @ torch.randn(512, 512)
    found = {
        "cpus": list(binding.cpus),
        "warnings": list(binding.warnings),
        "threads_of_torch": torch.get_num_threads(),
        "threads": cpus_of_threads(),
    }
    end.set()
    save(out, found)
    world.allgather_object(None)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
elif "BOUND" in os.environ:
    from horovod_volo.engine.callbacks import Callback
    from horovod_volo.engine.context import TrainContext
    from horovod_volo.plugins import register_callback

    @register_callback
    class ThreadsOfRank(Callback):
        """Saves where the threads of a rank that trains may run."""

        def logged(self, run: TrainContext, values: object) -> None:
            """Follow a log point."""
            save(os.environ["BOUND"], {"threads": cpus_of_threads()})
