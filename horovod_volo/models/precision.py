"""Autocast to bf16 or fp16, TF32, and convolutions that the CPU computes wrongly."""

import os

import torch
from torch import Tensor, nn

_WRONG_ON_AMX = (16, (4, 4), (4, 4))  # input channels, kernel and stride
_AUTOCAST_DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast context of a `--precision`; weights stay fp32."""
    dtype = _AUTOCAST_DTYPES[precision]
    kind = "cpu" if device.type == "meta" else device.type  # meta has no autocast
    return torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def compute_reproducibly(device: torch.device) -> None:
    """Let torch add in the same order always: with one thread, and on a GPU with deterministic kernels."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def precision_warnings(precision: str, device: torch.device) -> list[str]:
    """Return a warning if a precision has no effect on this device, or is slower than fp32."""
    if device.type != "cpu" or precision == "fp32":
        return []
    if precision == "tf32":
        return ["a CPU computes --precision tf32 in fp32"]
    if not hasattr(torch.cpu, "get_capabilities"):  # torch before 2.11: not known
        return []
    supports, units = torch.cpu.get_capabilities(), (f"avx512_{precision}", f"amx_{precision}")
    if supports["architecture"] != "x86_64" or any(supports[unit] for unit in units):
        return []
    return [f"this CPU emulates {precision} in fp32, which is many times slower: use --precision fp32"]


def prepare_precision(model: nn.Module, precision: str, device: torch.device) -> None:
    """Set what a `--precision` needs beside autocast: TF32, and fp32 where CPUs compute wrongly.

    CUDA rounds the inputs of fp32 products and convolutions to TF32 with "tf32" only. By default PyTorch
    does so in convolutions, but not in matrix products.

    On CPUs with AMX, torch 2.13 and 2.14 compute bf16 convolutions of 16 input channels, kernel 4 and
    stride 4 wrongly (tools/amx_convolution shows it). Remove this when every torch that setup.cfg allows
    computes them correctly.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if device.type != "cpu" or _AUTOCAST_DTYPES[precision] is None:
        return
    for module in model.modules():
        shape = tuple(getattr(module, name, 0) for name in ("in_channels", "kernel_size", "stride"))
        if type(module) is nn.Conv2d and shape == _WRONG_ON_AMX:
            module.__class__ = _Fp32Conv2d  # survives copy.deepcopy, and leaves parameter names unchanged


class _Fp32Conv2d(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            return super().forward(images.float())
