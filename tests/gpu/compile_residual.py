"""Compiles the kernels of residual branches for three generations of GPUs.

Prints the registers of a thread and the bytes that it spills. Run as a script, in a process of its own:
TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from horovod_volo.kernels import residual_kernels

TYPES = (
    dict.fromkeys(("tokens", "weight", "bias", "mean", "rstd", "result", "gradient"), "*fp32")
    | dict.fromkeys(("grad_skip", "grad_tokens", "grad_weight", "grad_bias"), "*fp32")
    | dict.fromkeys(("normed", "grad_normed", "branch", "grad_branch"), "*bf16")
    | dict.fromkeys(("rows", "position"), "*i64")
    | dict.fromkeys(("eps", "scale"), "fp32")
    | dict.fromkeys(("count", "length", "channels"), "i32")
)


def resources(name: str, capability: int, lanes: int) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it spills, for rows of `lanes` channels."""
    program = getattr(residual_kernels, name)
    blocks = {"mapped": True, "tile": 2048 // lanes, "lanes": lanes, "programs": 256}
    constants = {key: value for key, value in blocks.items() if key in program.arg_names}
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
    for name in ("normalize", "normalize_backward", "add_branch", "add_branch_backward"):
        for capability in (80, 90, 100):
            for lanes in (256, 512, 1024):
                print(name, capability, lanes, *resources(name, capability, lanes))
