"""Peak memory of a function, and resident memory of a process."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from horovod_volo.bench.comparison import Action, wait_for


def peak_extra_bytes(action: Action, device: torch.device) -> int:
    """Return the peak tensor memory that the action allocates, as the allocator counts it."""
    if device.type == "cuda":
        wait_for(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        action()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        action()
    # Only the exported trace has every allocation; the profiler's own table has sums by operation.
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return max(int(event["args"]["Total Allocated"]) for event in events if event.get("name") == "[memory]")


def resident_bytes() -> int:
    """Return how much of this process's memory is resident, shared and mapped pages included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
