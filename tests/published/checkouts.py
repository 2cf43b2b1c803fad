"""The published code, loaded from checkouts together with today's timm.

An environment variable names the folder with the checkouts; this repository contains none of that code. While
the published files are loaded, timm's functions are available under their former module names. numpy's former
`int` is not: only the code that draws the MixToken box uses it, and the tests replace that.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.objective.mixing import Box

VARIABLE = "HOROVOD_VOLO_PUBLISHED"
HOW_TO = (
    f"set {VARIABLE} to a folder with checkouts of sail-sg/volo, named volo, and of "
    "zihangJiang/TokenLabeling, named TokenLabeling"
)


@dataclass(frozen=True)
class PublishedCode:
    """The published modules."""

    volo: ModuleType
    volo_losses: ModuleType
    lvvit: ModuleType
    lvvit_losses: ModuleType
    targets: ModuleType  # dense targets of label maps, used by the training of both repositories
    weights: ModuleType  # loads files into networks, used by the training of both repositories
    transforms: ModuleType  # augments images with their label maps, in the training of both repositories

    def networks(self, name: str) -> ModuleType:
        """Return the module of a network."""
        return self.lvvit if name.startswith("lvvit") else self.volo

    def network(
        self, name: str, *, img_size: int = 224, num_classes: int = 1000, drop_path: float = 0.0
    ) -> Any:
        """Build a network as its training script does."""
        build = getattr(self.networks(name), name)
        return build(img_size=img_size, num_classes=num_classes, drop_path_rate=drop_path)

    @contextmanager
    def fixed_box(self, name: str, box: Box) -> Iterator[None]:
        """Replace the random box of a network in training mode by this one."""
        corners = (box.top, box.left, box.top + box.height, box.left + box.width)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.networks(name), "rand_bbox", lambda *_, **__: corners)
            yield


def named_folder() -> Path:
    """Return the folder with the checkouts; skip the test or the module if the variable is not set."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(HOW_TO, allow_module_level=True)
    return Path(folder)


def load(folder: Path) -> PublishedCode:
    """Load the published modules from the folder with both checkouts."""
    labelling = folder / "TokenLabeling" / "tlt"
    with _old_timm():
        found = PublishedCode(
            volo=_module("published_volo", folder / "volo" / "models", "volo"),
            volo_losses=_module("published_volo_loss", folder / "volo" / "loss", "cross_entropy"),
            lvvit=_module("published_lvvit", labelling / "models", "lvvit"),
            lvvit_losses=_module("published_lvvit_loss", labelling / "loss", "cross_entropy"),
            # The other modules of this package read images with functions that timm no longer has.
            targets=_file("published_targets_of_maps", labelling / "data" / "mixup.py"),
            weights=_module("published_weights", labelling / "utils", "utils"),
            transforms=_transforms(labelling / "data"),
        )
    found.targets.roi_align = _roi_align
    return found


@contextmanager
def _old_timm() -> Iterator[None]:
    import timm.layers

    modules: dict[str, dict[str, Any]] = {
        "timm.models.layers": vars(timm.layers),
        # Without registration, which would add the names to timm's own models.
        "timm.models.registry": {"register_model": lambda build: build},
        "timm.models.helpers": {"load_pretrained": None},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update({key: value for key, value in contents.items() if not key.startswith("__")})
            patch.setitem(sys.modules, name, module)
        yield


def _module(package: str, folder: Path, name: str) -> ModuleType:
    _file(package, folder / "__init__.py")
    return importlib.import_module(f"{package}.{name}")


def _transforms(folder: Path) -> ModuleType:
    """Load the transforms without their package, which uses functions that timm no longer has."""
    import timm.data.transforms

    package = ModuleType("published_transforms")
    package.__path__ = [str(folder)]
    ndimage = ModuleType("scipy.ndimage")
    vars(ndimage)["affine_transform"] = affine_transform
    scipy = ModuleType("scipy")
    vars(scipy)["ndimage"] = ndimage
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, package.__name__, package)
        patch.setitem(sys.modules, "scipy", scipy)
        patch.setitem(sys.modules, "scipy.ndimage", ndimage)
        renamed = timm.data.transforms.str_to_pil_interp
        patch.setattr(timm.data.transforms, "_pil_interp", renamed, raising=False)
        return importlib.import_module(f"{package.__name__}.label_transforms_factory")


def affine_transform(
    input: Tensor,  # noqa: A002, RUF100
    matrix: list[list[float]],
    order: int,
    mode: str,
) -> NDArray[np.float32]:
    """Replace scipy.ndimage.affine_transform with order 0, because scipy is not a dependency."""
    assert order == 0
    values, rows = np.asarray(input), np.array(matrix, dtype=np.float64)  # (k, height, width), (3, 4)
    positions = np.indices(values.shape).reshape(3, -1)
    source = rows[:, :3] @ positions + rows[:, 3:]  # (3, values)
    last = np.array(values.shape)[:, None] - 1
    nearest = np.floor(source.clip(0, last) + 0.5).astype(np.int64)
    read = values[tuple(nearest)]
    if mode == "constant":
        read = np.where(((source < 0) | (source > last)).any(axis=0), 0, read)
    return read.reshape(values.shape).astype(values.dtype)


def _file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: {HOW_TO}")
    folders = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _roi_align(input: Tensor, boxes: Tensor, output_size: tuple[int, int]) -> Tensor:  # noqa: A002, RUF100
    """Call torchvision's implementation of RoIAlign in Python, which needs no compiled operators."""
    from torchvision.ops.roi_align import _roi_align as lazily_compiled

    plain = lazily_compiled.__wrapped__
    averages = input.new_zeros(len(boxes), input.shape[1], *output_size)
    for row, box in zip(averages, boxes, strict=True):
        image = input[int(box[0])]
        # The averages of a class that no cell of the image has are zero, and need not be computed.
        shown = image.any(dim=(1, 2)).nonzero().flatten()
        region = torch.cat([torch.zeros(1), box[1:]]).unsqueeze(0)
        row[shown] = plain(image[shown].unsqueeze(0), region, 1.0, *output_size, -1, False)[0]
    return averages
