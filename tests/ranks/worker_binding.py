"""Binds this rank as the trainer does, starts threads, and saves the binding that the kernel reports."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.pinning import bind

out, mode, root = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
binding = bind(mode, root=root)

import torch  # noqa: E402  after bind, as in the trainer

from horovod_volo.cluster.world import World, rank_resources  # noqa: E402

world = World.connect(binding)
resources = rank_resources(world)
end = threading.Event()
threading.Thread(target=end.wait).start()
torch.randn(512, 512) @ torch.randn(512, 512)
status = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
allowed = {
    line.split()[1] for text in status for line in text.splitlines() if line.startswith("Cpus_allowed_list")
}
maps = Path("/proc/self/numa_maps").read_text().splitlines()
result = {
    "cpus": list(binding.cpus),
    "warnings": list(binding.warnings),
    "threads_of_torch": torch.get_num_threads(),
    "cpus_of_threads": sorted(allowed),
    "threads": len(status),
    "policy": sorted({fields[1] for fields in map(str.split, maps) if fields[2:3] == ["heap"]}),
    "variables": {name: os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "HOROVOD_THREAD_AFFINITY")},
}
end.set()
torch.save(result, out / f"rank_{read_launch_env().rank}.pt")
world.allgather_object(None)
