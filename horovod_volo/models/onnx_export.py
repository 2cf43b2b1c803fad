"""Exports a model to ONNX: from images (batch, 3, height, width) to the logits of evaluation.

ONNX represents a fold by Col2Im, which TensorRT and others lack, and an unfold by gathers of computed
indices. Outlook attention is therefore exported with both as grouped convolutions with one-hot weights,
which are exact; adaptive average pooling, which has gathers too, as products with matrices. Invariant: in
evaluation the logits equal those of the trained model.
"""

import copy
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.core.errors import UserError
from horovod_volo.models.outlook import Outlook
from horovod_volo.models.timm_export import fixed_images

IMAGES, LOGITS = "images", "logits"
Sides = Literal["fixed", "dynamic"]  # height and width of the images

_NEEDED = ("onnx", "onnxscript")
# Images of another grid than the network's own, so that the resizing of a position embedding is exported.
_MORE_ROWS, _MORE_COLUMNS = 80, 112


def check_packages() -> None:
    """Raise UserError if packages of the exporter are not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(
            f"--onnx needs {' and '.join(missing)}. Install: pip install 'horovod_volo[export]'. Or drop "
            "--onnx."
        )


def write_onnx(
    network: nn.Module,
    file: Path,
    *,
    image_side: int,
    batch: int,
    opset: int,
    outputs: Sequence[str] = (LOGITS,),
    sides: Sides = "fixed",
    properties: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> None:
    """Write a model for batches of `batch` images; 0: of any size. The model itself is not changed.

    With dynamic sides the images may have any height and width, which the model must allow. `properties`
    become the file's, as JSON; those that are empty are left out.
    """
    dynamic = {} if batch else {0: torch.export.Dim("batch")}
    images = fixed_images(batch or 2, image_side)  # the exporter would make a batch of 1 static
    if sides == "dynamic":
        dynamic |= {2: torch.export.Dim("height"), 3: torch.export.Dim("width")}
        images = fixed_images(len(images), image_side + _MORE_ROWS, image_side + _MORE_COLUMNS)
    # The exporter causes warnings about its own use of torch.
    with warnings.catch_warnings(action="ignore"):
        try:
            program = torch.onnx.export(
                exportable(network),
                (images,),
                input_names=[IMAGES],
                output_names=list(outputs),
                dynamic_shapes=(dynamic,) if dynamic else None,
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            reason = " ".join(str(error.__cause__ or error).split())[:300]
            raise _cannot_write(network, reason, image_side, batch, sides) from error
    # If a capture with dynamic sizes fails, the exporter may capture the example's sizes, and say nothing.
    assert program is not None
    shape = program.model.graph.inputs[0].shape
    assert shape is not None
    if any(isinstance(shape[axis], int) for axis in dynamic):
        raise _cannot_write(network, "it can only be traced with fixed sizes", image_side, batch, sides)
    for name, values in properties.items():
        if values:
            program.model.metadata_props[name] = json.dumps(list(values))
    program.save(file)  # weights of more than 1.5 GiB into a second file


def _cannot_write(network: nn.Module, reason: str, image_side: int, batch: int, sides: Sides) -> UserError:
    remedy = f"--img-size {image_side}" if sides == "dynamic" else "" if batch else "--batch 1"
    advice = f"Try {remedy}, or drop --onnx." if remedy else "Drop --onnx."
    return UserError(f"torch cannot write {type(network).__name__} as ONNX ({reason}). {advice}")


def onnx_difference(network: nn.Module, file: Path, batches: Iterable[tuple[int, int, int]]) -> float | None:
    """Return the largest difference from onnxruntime's outputs; None if that is not installed.

    Of each batch, `batches` has the number of images, their height and their width.
    """
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    differences = []
    for shape in batches:
        images = fixed_images(*shape)
        with torch.inference_mode():
            expected = network(images)
        wanted = (expected,) if isinstance(expected, Tensor) else expected
        for values, other in zip(session.run(None, {IMAGES: images.numpy()}), wanted, strict=True):
            if values.shape != tuple(other.shape):
                raise RuntimeError(f"{file} gives {values.shape}, not {tuple(other.shape)}")
            differences.append(float((torch.from_numpy(values) - other).abs().max()))
    return max(differences)


def place_weights(channels: int, kernel: int) -> Tensor:
    """Return one-hot weights (channels * kernel², 1, kernel, kernel), one per position of a window."""
    places = kernel * kernel
    return torch.eye(places).reshape(places, 1, kernel, kernel).repeat(channels, 1, 1, 1)


def unfold_windows(cells: Tensor, weights: Tensor, *, padding: int, stride: int) -> Tensor:
    """Return F.unfold with the windows as a grid: (batch, channels * kernel², rows, columns)."""
    return F.conv2d(cells, weights, padding=padding, stride=stride, groups=cells.shape[1])


def fold_windows(
    windows: Tensor, weights: Tensor, size: tuple[int, int], *, padding: int, stride: int
) -> Tensor:
    """Sum overlapping windows (batch, channels * kernel², rows, columns), as F.fold does."""
    kernel, (height, width) = weights.shape[-1], size
    # Cells to the right of and below the last window, which an unfold of this size does not read.
    beyond = [
        whole - ((count - 1) * stride - 2 * padding + kernel)
        for whole, count in zip(size, windows.shape[2:], strict=True)
    ]
    # In ONNX these are constants. Where the size is dynamic, there are as many as possible, then cut off.
    is_fixed = all(isinstance(count, int) for count in beyond)
    folded = F.conv_transpose2d(
        windows,
        weights,
        stride=stride,
        padding=padding,
        output_padding=beyond if is_fixed else stride - 1,
        groups=windows.shape[1] // kernel**2,
    )
    return folded if is_fixed else folded[:, :, :height, :width]


class ConvolvedOutlook(Outlook):
    """Outlook attention with convolutions in place of unfold and fold, for evaluation only."""

    weights: Tensor  # `place_weights`

    def forward(self, cells: Tensor) -> Tensor:
        """Return cells of the same shape (batch, rows, columns, channels)."""
        heads, places = self.num_heads, self.kernel_size**2
        geometry = {"padding": self.padding, "stride": self.stride}
        unfolded = unfold_windows(self.v(cells).permute(0, 3, 1, 2), self.weights, **geometry)
        channels, rows, columns = unfolded.shape[1:]
        windows = unfolded.reshape(-1, heads, channels // heads // places, places, rows * columns)
        logits = self.logits(cells).reshape(-1, rows * columns, heads, places, places)
        weights = (logits.transpose(1, 2) * self.scale).softmax(dim=-1)
        mixed = weights @ windows.permute(0, 1, 4, 3, 2)  # (batch, heads, windows, places, width)
        mixed = mixed.permute(0, 1, 4, 3, 2).reshape(-1, channels, rows, columns)
        folded = fold_windows(mixed, self.weights, (cells.shape[1], cells.shape[2]), **geometry)
        projected: Tensor = self.proj(folded.permute(0, 2, 3, 1))
        return projected


class MatrixPool(nn.Module):
    """Adaptive average pooling to a square of cells, of maps (batch, channels, height, width)."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, maps: Tensor) -> Tensor:
        """Return the mean of each cell (batch, channels, cells, cells)."""
        rows, columns = (self._means(size).to(maps) for size in maps.shape[2:])
        return rows @ maps @ columns.mT

    def _means(self, size: int) -> Tensor:
        """Return the weights (cells, size) of the places in the mean of each cell."""
        cell, place = torch.arange(self.cells)[:, None], torch.arange(size)
        # From floor(cell * size / cells) up to ceil((cell + 1) * size / cells), without divisions.
        inside = (cell * size < (place + 1) * self.cells) & (place * self.cells < (cell + 1) * size)
        return inside / inside.sum(dim=1, keepdim=True)


def exportable(network: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode, with outlook attention and adaptive pooling as above."""
    own = copy.deepcopy(network).eval()
    for module in list(own.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.AdaptiveAvgPool2d) and isinstance(child.output_size, int):
                setattr(module, name, MatrixPool(child.output_size))
        if isinstance(module, Outlook):
            weights = place_weights(module.v.out_features, module.kernel_size).to(module.v.weight)
            module.register_buffer("weights", weights, persistent=False)
            module.__class__ = ConvolvedOutlook
    return own
