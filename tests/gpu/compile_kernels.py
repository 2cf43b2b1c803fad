"""Compiles the kernels of a module for three generations of GPUs.

Prints the registers of a thread and the bytes that it spills. It runs as a script, because TRITON_INTERPRET
must not be set.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

TYPES = (
    dict.fromkeys(("tokens", "weight", "bias", "mean", "rstd", "result"), "*fp32")
    | dict.fromkeys(("grad_skip", "grad_tokens", "grad_weight", "grad_bias", "parts", "sums"), "*fp32")
    | dict.fromkeys(("running_mean", "running_var"), "*fp32")
    | dict.fromkeys(
        ("normed", "grad_normed", "branch", "grad_branch", "activated", "x", "grad_x", "gradient"), "*bf16"
    )
    | dict.fromkeys(("rows", "position", "next_position", "branch_position"), "*i64")
    | dict.fromkeys(("eps", "scale", "momentum"), "fp32")
    | dict.fromkeys(("count", "length", "channels", "area", "height", "width", "columns"), "i32")
    | dict.fromkeys(("query", "own", "others", "grad_query", "grad_own", "grad_others"), "*bf16")
    | {"log_sums": "*fp32", "heads": "i32"}
    | dict.fromkeys(("images", "augmented", "tables"), "*u8")
    | {"parameters": "*fp64", "std": "*fp32", "noise": "*fp32", "boxes": "*i64"}
)


def cases(module: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kernels of a module, each with its constants."""
    if module == "augment":
        yield "statistics_tables", {"block": 4096}
        yield "apply_layer", {"block": 512}
        yield "normalize_images", {"block": 512, "count": 1, "mode": "pixel"}


def resources(program: Any, capability: int, constants: dict[str, Any]) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it spills."""
    constants = {key: value for key, value in constants.items() if key in program.arg_names}
    signature = {key: TYPES.get(key, "constexpr") for key in program.arg_names}
    source = ASTSource(program, signature, constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    architecture = re.findall(r"\.target (sm_\w+)", ptx)[0]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"-arch={architecture}", "-o", "/dev/null", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.findall(r"Used (\d+) registers", report)[0]), int(
        re.findall(r"(\d+) bytes spill", report)[0]
    )


if __name__ == "__main__":
    kernels = importlib.import_module(f"horovod_volo.kernels.{sys.argv[1]}_kernels")
    for name, constants in cases(sys.argv[1]):
        for capability in (80, 90, 100):
            print(name, capability, *resources(getattr(kernels, name), capability, constants))
