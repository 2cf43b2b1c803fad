"""Exports a model to ONNX: from images (batch, 3, side, side) to the logits of evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from horovod_volo.core.errors import UserError
from horovod_volo.models.outlook_export import exportable
from horovod_volo.models.timm_export import fixed_images

IMAGES, LOGITS = "images", "logits"

_NEEDED = ("onnx", "onnxscript")
# An ONNX file is limited to 2 GiB; the weights of larger models are stored in a second file.
_LARGEST_FILE_BYTES = 1_900_000_000


def check_packages() -> None:
    """Raise UserError if packages of the exporter are not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(
            f"--onnx needs {' and '.join(missing)}. Install: python -m pip install --no-build-isolation "
            "-e '.[export]' in the folder of horovod_volo. Or drop --onnx."
        )


def write_onnx(network: nn.Module, file: Path, *, image_side: int, batch: int, opset: int) -> None:
    """Write a model for batches of `batch` images; 0: of any size. The model itself is not changed."""
    images = fixed_images(batch or 2, image_side)  # the exporter would make a batch of 1 static
    size = sum(tensor.nbytes for tensor in network.state_dict().values())
    # The exporter causes warnings about its own use of torch.
    with warnings.catch_warnings(action="ignore"):
        try:
            torch.onnx.export(
                exportable(network),
                (images,),
                file,
                input_names=[IMAGES],
                output_names=[LOGITS],
                dynamic_shapes=None if batch else ({0: torch.export.Dim("batch")},),
                opset_version=opset,
                external_data=size > _LARGEST_FILE_BYTES,
                dynamo=True,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            reason = " ".join(str(error.__cause__ or error).split())[:300]
            advice = "Drop --onnx." if batch else "Try --batch 1, or drop --onnx."
            raise UserError(
                f"torch cannot write {type(network).__name__} as ONNX ({reason}). {advice}"
            ) from error


def onnx_difference(
    network: nn.Module, file: Path, *, image_side: int, batches: Iterable[int]
) -> float | None:
    """Return the largest difference from onnxruntime's logits; None if that is not installed."""
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    differences = []
    for batch in batches:
        images = fixed_images(batch, image_side)
        with torch.inference_mode():
            expected = network(images)
        logits = torch.from_numpy(session.run([LOGITS], {IMAGES: images.numpy()})[0])
        if logits.shape != expected.shape:
            raise RuntimeError(f"{file} gives {tuple(logits.shape)}, not {tuple(expected.shape)}")
        differences.append(float((logits - expected).abs().max()))
    return max(differences)
