"""The benchmarks of one GPU in parts of at most eight minutes, and its ceilings in the work of VOLO's step.

Each benchmark is a process of its own, and is recorded as soon as it has ended: one that fails or takes too
long costs nothing else, and the next call continues with what is not measured yet.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from horovod_volo.bench.comparison import Action, default_device, repeats_for, timed
from horovod_volo.bench.results import Figure, Flag, Result, read_records
from horovod_volo.core.errors import UserError

_STEP = "--precision bf16 --img-size 224"
_D1 = f"--model volo_d1 --batch-size 256 --drop-path 0.1 {_STEP}"
_D5 = f"--model volo_d5 --batch-size 128 {_STEP}"
_D5_SLOW = f"{_D5} --drop-path 0.1"  # computes nearly all branches
# Seconds that each may take, and its command line. The batch sizes fit into the memory of 80 GB.
PARTS: dict[str, Sequence[tuple[int, str]]] = {
    "ceilings": [(120, "ceilings")],
    "d1": [
        (90, f"step {_D1}"),
        (150, f"peers {_D1} --against eager"),
        (180, f"step {_D1} --compile"),
    ],
    "d1-compiled": [
        (90, f"step {_D1} --kernels plain"),
        (240, f"peers {_D1} --against compile"),
        (120, f"step {_D1.replace('256', '64')}"),
    ],
    "d5": [
        (120, f"step {_D5} --drop-path 0.75"),
        (120, f"step {_D5_SLOW}"),
        (240, f"peers {_D5_SLOW} --against eager"),
    ],
    "d5-compiled": [
        (200, f"step {_D5} --drop-path 0.75 --compile"),
        (240, f"peers {_D5_SLOW} --against compile"),
    ],
    "large": [
        (120, f"step {_D5_SLOW.replace('224', '448').replace('128', '64')}"),
        (120, f"step {_D5_SLOW.replace('224', '512').replace('128', '48')}"),
    ],
}

_BLOCKS = 7
_TOKENS = 256 * 14 * 14  # of a batch of VOLO-D1's transformer stages
_PIXELS = 4 * _TOKENS  # of its outlookers
# Rows, inputs and outputs of D1's linear layers: attention, MLP, head; an outlooker's logits, values, MLP.
_PRODUCTS = (
    *((_TOKENS, *widths) for widths in ((384, 1152), (384, 384), (1152, 384), (384, 1000), (192, 486))),
    *((_PIXELS, *widths) for widths in ((192, 192), (192, 576), (576, 192))),
)
_ATTENTION = {"D1": (256, 12, 196, 32), "D5": (128, 16, 196, 48)}  # batch, heads, tokens, width
_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_COPIED = 2**30  # bytes


def measure(
    *,
    parts: Annotated[Sequence[str], Flag(f"of {', '.join(PARTS)}")],
    out: Annotated[str, Flag("folder of results.jsonl and log.txt")] = "runs/gpu",
) -> str:
    """Measure parts of the plan; return what was measured and what failed."""
    if unknown := sorted(set(parts) - PARTS.keys()):
        raise UserError(f"There is no part {', '.join(unknown)}. The parts are {', '.join(PARTS)}.")
    if not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU here. `horovod-volo doctor` says why.")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for limit, flags in (line for part in parts for line in PARTS[part]):
        command = f"python -m horovod_volo.bench {flags}"
        if command not in (record["command"] for record in read_records(folder / "results.jsonl")):
            began = perf_counter()
            outcome = _run(folder, limit, command)
            print(f"{perf_counter() - began:4.0f} s  {outcome}  {flags}", flush=True)
            failed += outcome != "measured"
    if failed:
        raise UserError(f"{failed} benchmarks failed: see {folder / 'log.txt'}. Others are in {folder}.")
    return f"All results are in {folder}."


def _run(folder: Path, limit: int, command: str) -> str:
    with (folder / "results.jsonl").open("ab") as results, (folder / "log.txt").open("a") as log:
        print(f"== {command}", file=log, flush=True)
        words = [sys.executable, *command.split()[1:], "--json"]
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=log, timeout=limit, check=True)
        except subprocess.TimeoutExpired:
            return "took too long"
        except subprocess.CalledProcessError as error:
            return f"failed with status {error.returncode}"
        results.write(done.stdout)
    return "measured"


def measure_ceilings() -> Result:
    """Measure a copy, the products of VOLO-D1 in three directions, and the backends of attention."""
    device = default_device()
    return Result("ceilings", f"copy, products and attention in bf16, {device.type}", list(_figures(device)))


def _figures(device: torch.device) -> Iterator[Figure]:
    source = torch.empty(_COPIED // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    yield Figure.of("copy", 2 * _COPIED / 1e9 / _block_seconds(lambda: target.copy_(source), device), "GB/s")
    for rows, width, outputs in _PRODUCTS:
        tokens = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
        weight = torch.randn(outputs, width, dtype=torch.bfloat16, device=device)
        gradient = tokens @ weight.T
        flops = 2 * rows * width * outputs / 1e12
        name = f"{rows} x {width} x {outputs}"
        for direction, product in (
            ("forward", lambda: F.linear(tokens, weight)),  # noqa: B023
            ("gradient of tokens", lambda: gradient @ weight),  # noqa: B023
            ("gradient of weights", lambda: gradient.T @ tokens),  # noqa: B023
        ):
            yield Figure.of(f"{name}, {direction}", flops / _block_seconds(product, device), "TFLOP/s")
    for name, shape in _ATTENTION.items():
        inputs = [
            torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)
        ]
        for backend in _BACKENDS:
            try:
                with sdpa_kernel(backend):
                    seconds = _block_seconds(lambda: _attend(*inputs), device)  # noqa: B023
            except RuntimeError:  # this device or this build has no such backend
                continue
            yield Figure.of(f"attention of {name}, forward and backward, {backend.name}", 1e3 * seconds, "ms")


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    result = F.scaled_dot_product_attention(queries, keys, values)
    torch.autograd.grad(result, [queries, keys, values], result.detach())


def _block_seconds(action: Action, device: torch.device) -> NDArray[np.float64]:
    block = timed(action, repeats_for(timed(action, 1, device)), device)
    return np.array([block() for _ in range(_BLOCKS)])
