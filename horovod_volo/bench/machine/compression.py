"""Error of fp16 gradient compression, tensor by tensor, against the error of computing gradients in bf16.

More ranks than are available are emulated: each one's gradient is of its own images, and the sum is computed
in the arithmetic of the all-reduce, one rank after the other, as a ring does for each part of a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from horovod_volo.bench.cli import BatchSize, DataDir, Flag, ImgSize, ModelName
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import CLASSES, ModelWithLoss
from horovod_volo.cluster.buckets import Bucket
from horovod_volo.cluster.collectives import Wait
from horovod_volo.cluster.compression import BucketScales, Fp16Compression
from horovod_volo.cluster.reducer import build_gradient_buckets
from horovod_volo.config.update_settings import Exchange
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.image_bytes import decoded_rgb
from horovod_volo.models.build import build_model, spec_of
from horovod_volo.models.precision import autocast, fix_convolutions

_CPU = torch.device("cpu")
_SAMPLED_RANKS = 4  # over which the error of bf16 arithmetic and the maxima are averaged
_TRAINING_BATCH, _LEARNING_RATE, _LAST_LOSSES = 16, 5e-4, 10

SumName = Literal["fp16", "fp16-all", "fp16-fixed", "fp16-halves", "bf16"]


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 1,
    steps: Annotated[int, Flag("training steps before the measurement")] = 10,
    ranks: Annotated[Sequence[int], Flag("numbers of emulated ranks")] = (2, 8, 40),
    data_dir: DataDir = "data/demo",
    forms: Annotated[
        Sequence[SumName],
        Flag(
            "forms of the sum: as the trainer does; all tensors in fp16; that with a fixed factor; two fp16 "
            "messages; bf16"
        ),
    ] = ("fp16", "fp16-all", "fp16-fixed", "fp16-halves", "bf16"),
) -> Result:
    """Compare forms of the exchange on the weights of a network after some training steps."""
    source = _GradientSource(model, data_dir, img_size, batch_size)
    loss = source.train(steps)
    bf16_errors, maxima = _errors_of_bf16(source)
    sums = {
        (number, form): [
            _sum("exact" if form == "fp16" and not bucket.compressible else form, bucket, number, maximum)
            for bucket, maximum in zip(source.buckets, maxima, strict=True)
        ]
        for number in ranks
        for form in ("exact", *forms)
    }
    for rank in range(max(ranks)):
        source.fill_buckets(rank, "bf16")
        for totals in (totals for (number, _), totals in sums.items() if rank < number):
            for bucket, total in zip(source.buckets, totals, strict=True):
                total.add(bucket.gradients)
    figures = [
        Figure("buckets", len(source.buckets), ""),
        Figure("least error of a tensor by bf16 arithmetic", 100 * min(bf16_errors.values()), "%"),
    ]
    exact: dict[str, Tensor] = {}
    for (number, form), totals in sums.items():
        found = source.by_name([total.average() for total in totals])
        if form == "exact":
            exact = {name: average for name, average in found.items() if average.any()}
        else:
            figures += _figures(f"{number} ranks, {form}", found, exact, bf16_errors)
    what = f"gradients of {batch_size} images a rank, {img_size} px, bf16, after {steps} steps"
    return Result(f"compression {model} {steps} steps", f"{what}: loss {loss:.2f}", figures)


def _figures(
    what: str, found: dict[str, Tensor], exact: dict[str, Tensor], bf16_errors: dict[str, float]
) -> Iterator[Figure]:
    errors = {name: _relative_error(found[name], right) for name, right in exact.items()}
    zeros = max(float(((found[name] == 0) & (exact[name] != 0)).float().mean()) for name in exact)
    worst = max(errors, key=lambda name: errors[name])
    above = sum(error > bf16_errors[name] for name, error in errors.items())
    yield Figure(f"{what}: largest error, {worst}", 100 * errors[worst], "%")
    yield Figure(f"{what}: largest fraction that becomes zero", 100 * zeros, "%")
    yield Figure(f"{what}: tensors above bf16 arithmetic's error", above, "")


class _GradientSource:
    """A network, images in a fixed random order, and buckets for the gradients of each rank's own images."""

    def __init__(self, model: str, data_dir: str, img_size: int, batch_size: int) -> None:
        self._side, self._batch = img_size, batch_size
        files = sorted(path for path in Path(data_dir, "train").glob("*/*") if path.is_file())
        self._classes = sorted({path.parent for path in files})
        if not 0 < len(self._classes) <= CLASSES:
            raise UserError(f"There are no images in {data_dir}/train/CLASS/ of {CLASSES} classes or fewer.")
        self._files = [files[place] for place in np.random.default_rng(0).permutation(len(files))]
        torch.manual_seed(0)
        network = build_model(model, img_size=img_size, num_classes=CLASSES, drop_path=0.0).train()
        fix_convolutions(network, "bf16", _CPU)
        self._model = ModelWithLoss(network)
        parameters, heads = dict(network.named_parameters()), spec_of(model).heads
        self.buckets = build_gradient_buckets(parameters, Exchange(), heads=heads, ranks=2, shards=1)

    def train(self, steps: int) -> float:
        """Take steps of AdamW, each on images of its own; return the mean loss of the last few."""
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=_LEARNING_RATE, weight_decay=0.05)
        losses = [self._loss(0, self._batch, "bf16").item()]
        for step in range(steps):
            optimizer.zero_grad()
            loss = self._loss(step * _TRAINING_BATCH, _TRAINING_BATCH, "bf16")
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        return fmean(losses[-_LAST_LOSSES:])

    def fill_buckets(self, rank: int, precision: str) -> None:
        """Compute the gradients of one rank's images into the buckets."""
        self._model.zero_grad()
        self._loss(rank * self._batch, self._batch, precision).backward()  # type: ignore[no-untyped-call]
        for bucket in self.buckets:
            for name, parameter in bucket.parameters.items():
                if parameter.grad is not None:
                    bucket.view(bucket.gradients, name).copy_(parameter.grad)

    def by_name(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return views of the tensors in flat tensors with the layout of the buckets."""
        pairs = list(zip(self.buckets, flat, strict=True))
        return {name: bucket.view(each, name) for bucket, each in pairs for name in bucket.parameters}

    def _loss(self, first: int, number: int, precision: str) -> Tensor:
        chosen = [self._files[place % len(self._files)] for place in range(first, first + number)]
        images = torch.stack([self._image(path) for path in chosen])
        classes = torch.tensor([self._classes.index(path.parent) for path in chosen])
        with autocast(precision, _CPU):
            loss: Tensor = self._model(images, classes)
        return loss

    def _image(self, path: Path) -> Tensor:
        sides = (self._side, self._side)
        pixels = decoded_rgb(path.read_bytes()).resize(sides, Image.Resampling.BICUBIC)
        image = torch.from_numpy(np.asarray(pixels, dtype=np.float32)).permute(2, 0, 1)
        return (image - 120.0) / 60.0


class Sum(NamedTuple):
    """The sum of one bucket's gradients over ranks."""

    add: Callable[[Tensor], object]  # the gradients of one more rank, which stay as they are
    average: Callable[[], Tensor]  # after all ranks were added


def _sum(form: str, bucket: Bucket, ranks: int, maximum: Tensor) -> Sum:
    if form in ("exact", "bf16"):
        total = torch.zeros_like(bucket.gradients, dtype=torch.bfloat16 if form == "bf16" else torch.float32)
        return Sum(lambda gradients: total.add_(gradients.to(total.dtype)), lambda: total.float() / ranks)
    scales = _scales(ranks, maximum, adaptive=form != "fp16-fixed")
    if form != "fp16-halves":
        return _fp16_sum(bucket, ranks, scales)
    # The rounding error of the first fp16 message is sent in a second of the same size.
    high = _fp16_sum(bucket, ranks, scales)
    low = _fp16_sum(bucket, ranks, _scales(ranks, maximum * 2**-11))

    def add(gradients: Tensor) -> None:
        high.add(gradients)
        low.add(gradients - (gradients * scales.scale[0]).half().float() / scales.scale[0])

    return Sum(add, lambda: high.average() + low.average())


def _scales(ranks: int, maximum: Tensor, *, adaptive: bool = True) -> BucketScales:
    scales = BucketScales(maximum.view(1).clone(), ranks, adaptive=adaptive)
    scales.update()
    return scales


def _fp16_sum(bucket: Bucket, ranks: int, scales: BucketScales) -> Sum:
    """Use the trainer's own compression, around an all-reduce that adds up what it is given."""
    total = torch.zeros_like(bucket.gradients, dtype=torch.float16)
    own = torch.zeros_like(bucket.gradients)
    receive: list[Wait] = []

    def allreduce(tensor: Tensor, name: str) -> Callable[[], Tensor]:  # noqa: ARG001
        total.add_(tensor)
        return lambda: total

    compression = Fp16Compression(own, own, allreduce, ranks, "bucket", scales=scales, number=0)

    def add(gradients: Tensor) -> None:
        own.copy_(gradients)
        compression.compress_bucket()
        receive[:] = [compression.launch()]

    def average() -> Tensor:
        receive[0]()
        return own

    return Sum(add, average)


def _relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _errors_of_bf16(source: _GradientSource) -> tuple[dict[str, float], Tensor]:
    """Return the relative error of each tensor's mean over a few ranks, computed in bf16 instead of fp32.

    Also return the mean over these ranks of each bucket's maximum, which stands for that of the step before.
    """
    sums = {kind: [torch.zeros_like(b.gradients) for b in source.buckets] for kind in ("fp32", "bf16")}
    for precision, totals in sums.items():
        maxima = torch.zeros(len(source.buckets))
        for rank in range(_SAMPLED_RANKS):
            source.fill_buckets(rank, precision)
            for total, bucket in zip(totals, source.buckets, strict=True):
                total += bucket.gradients
            maxima += torch.stack([bucket.gradients.abs().max() for bucket in source.buckets])
    exact, lower = (source.by_name(totals) for totals in sums.values())
    errors = {name: _relative_error(lower[name], right) for name, right in exact.items() if right.any()}
    return errors, maxima / _SAMPLED_RANKS
