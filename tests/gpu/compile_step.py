"""Compiles every Triton program that training steps launch, for GPUs that are not there.

Arguments: runs as JSON, their settings and the `steps` to take. The real steps run on the CPU, whose tensors
are taken for a GPU's: each launch is replaced by compilations, so that only what is launched counts, not the
results. Each kind of block of a network occurs once: all of a kind launch the same programs. Prints a line of
JSON for each run: of each program the compute capability, the name, the registers and the bytes that a thread
spills, and the step that launched it first.
"""

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from horovod_volo.bench import synthetic
from horovod_volo.bench.synthetic import bench_config, random_batch, synthetic_context
from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.data_settings import Data
from horovod_volo.core import operators
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.policy import draw_operations
from horovod_volo.data.augmentation.random_erasing import Eraser, draw_erasures
from horovod_volo.engine.step import train_step
from horovod_volo.models.lvvit import LVVIT_SIZES
from horovod_volo.models.volo import SIZES

CPU = torch.device("cpu")
CAPABILITIES = (80, 90, 100)


class AbsentGpus:
    """A driver of Triton's for GPUs that are not there."""

    current = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITIES[self.current], 32)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return device


class Launches:
    """What was compiled instead of being launched."""

    def __init__(self, gpus: AbsentGpus) -> None:
        self.step = 0
        self.first_steps: dict[str, int] = {}
        self.programs: dict[str, Any] = {}
        self._gpus = gpus

    def compile_instead(self, program: Any, grid: Any) -> Any:
        """Take the place of `program[grid]`."""

        def compiled(*args: Any, **kwargs: Any) -> None:
            for self._gpus.current in range(len(CAPABILITIES)):
                made = program.warmup(*args, grid=grid, **kwargs)
                self.first_steps.setdefault(made.hash, self.step)
                self.programs[made.hash] = made

        return compiled


def resources(program: Any) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it spills."""
    ptx = program.asm["ptx"]
    architecture = re.findall(r"\.target (sm_\w+)", ptx)[0]
    ptxas = get_ptxas(program.metadata.target.arch).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas, "-v", f"-arch={architecture}", "-o", "/dev/null", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    return int(re.findall(r"Used (\d+) registers", report)[0]), sum(map(int, spills[0]))


def augment(images: int, side: int, step: int) -> None:
    """Augment, normalise and erase a batch as a loader on a GPU does."""
    settings, numbers = Data(reprob=0.25), np.arange(images)
    pixels = torch.randint(256, (images, 3, side, side), dtype=torch.uint8)
    augment_(pixels, draw_operations(0, step, numbers, settings))
    mean = torch.zeros(3, 1, 1)
    Eraser(0, settings, side, CPU).normalize(
        pixels, mean, mean + 1, draw_erasures(0, step, numbers, settings, side)
    )


def compile_steps(gpus: AbsentGpus, settings: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Take steps, and return what they launch."""
    launches = Launches(gpus)
    JITFunction.__getitem__ = lambda self, grid: launches.compile_instead(self, grid)
    config = bench_config(**({"precision": "bf16", "img_size": 64, "batch_size": 2} | settings))
    context = synthetic_context(config, World.single(), RankResources(CPU, torch.get_num_threads(), ""))
    for launches.step in range(1, steps + 1):
        augment(config.data.batch_size, config.model.img_size, launches.step)
        train_step(context, iter([random_batch(config, CPU, seed=launches.step)]))
    assert context.state.step == steps
    context.close()
    return [
        {"capability": program.metadata.target.arch, "name": program.metadata.name}
        | dict(zip(("registers", "spilled"), resources(program), strict=True))
        | {"first step": launches.first_steps[key]}
        for key, program in launches.programs.items()
    ]


if __name__ == "__main__":
    driver.set_active(gpus := AbsentGpus())
    operators._DEVICES = ("cpu",)
    synthetic.choose_kernels = lambda *_: operators.use_kernels(operators.OPERATORS)
    for sizes in SIZES.values():
        sizes["layers"] = (1, 1, 1, 1)
    for sizes in LVVIT_SIZES.values():
        sizes["layers"] = 1
    for argument in sys.argv[1:]:
        run = json.loads(argument)
        print(json.dumps(compile_steps(gpus, run, run.pop("steps", 1))), flush=True)
