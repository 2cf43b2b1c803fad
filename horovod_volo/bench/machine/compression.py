"""Error of fp16 gradient compression, tensor by tensor, against the error of computing gradients in bf16.

More ranks than are available are emulated: each one's gradient is of its own images, and the sum is computed
in the arithmetic of the all-reduce, one rank after the other, as a ring does for each part of a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from horovod_volo.bench.cli import BatchSize, DataDir, Flag, ImgSize, Model
from horovod_volo.bench.machine.reduce_methods import ModelWithLoss, network_heads
from horovod_volo.bench.results import Figure, Result
from horovod_volo.cluster.buckets import Bucket, build_buckets
from horovod_volo.cluster.collectives import Wait
from horovod_volo.cluster.compression import BucketScales, Fp16Compression, NoCompression, summed_in_fp32
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model
from horovod_volo.models.precision import autocast, fix_convolutions

_CPU = torch.device("cpu")
_BUCKET_BYTES, _LAST_BUCKET_BYTES = 25 * 2**20, 2**20
_RANKS_OF_MAXIMA = 4  # whose mean maxima stand for those of the step before
_RANKS_OF_BF16 = 4  # over which the error of bf16 arithmetic is averaged
_TRAINING_BATCH, _LEARNING_RATE, _LAST_LOSSES = 16, 5e-4, 10

Form = Literal["fp16", "fp16-all", "fp16-fixed", "fp16-halves", "bf16"]


def measure(
    *,
    model: Model = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 1,
    classes: Annotated[int, Flag("classes of the network; the images have the first few")] = 1000,
    steps: Annotated[int, Flag("training steps before the measurement")] = 10,
    ranks: Annotated[Sequence[int], Flag("numbers of emulated ranks")] = (2, 8, 40),
    data_dir: DataDir = "data/demo",
    forms: Annotated[
        Sequence[Form],
        Flag(
            "forms of the sum: as the trainer does; all tensors in fp16; that with a fixed factor; two fp16 "
            "messages; bf16"
        ),
    ] = ("fp16", "fp16-all", "fp16-fixed", "fp16-halves", "bf16"),
) -> Result:
    """Compare forms of the exchange on the weights of a network after some training steps."""
    torch.manual_seed(0)
    files = _files(data_dir)
    folders = len({path.parent for path in files})
    if classes < folders:
        raise UserError(f"{data_dir} has {folders} classes. Use --classes {folders} or more.")
    network = build_model(model, img_size=img_size, num_classes=classes, drop_path=0.0).train()
    fix_convolutions(network, "bf16", _CPU)
    heads = network_heads(model)
    source = _GradientSource(ModelWithLoss(network), heads, files, img_size, batch_size)
    loss = source.train(steps)
    bf16_errors, maxima = _errors_of_bf16(source), _mean_maxima(source)
    exchanges = [
        _Exchange(number, form, source.buckets, maxima) for number in ranks for form in ("exact", *forms)
    ]
    for rank in range(max(ranks)):
        source.build_buckets(rank, "bf16")
        for exchange in exchanges:
            if rank < exchange.ranks:
                exchange.add()
    figures = list(_figures(exchanges, bf16_errors))
    what = f"gradients of {batch_size} images a rank, {img_size} px, bf16, after {steps} steps"
    figures.insert(0, Figure("buckets", len(source.buckets), ""))
    return Result(f"compression {model} {steps} steps", f"{what}: loss {loss:.2f}", figures)


def _files(data_dir: str) -> list[Path]:
    """Return the training images in a fixed random order."""
    files = sorted(path for path in Path(data_dir, "train").glob("*/*") if path.is_file())
    if not files:
        raise UserError(f"There are no images in {data_dir}/train/CLASS/. Give --data-dir.")
    return [files[place] for place in np.random.default_rng(0).permutation(len(files))]


class _GradientSource:
    """A network, images, and buckets for the gradients of each rank's own images."""

    def __init__(
        self, model: ModelWithLoss, heads: list[str], files: list[Path], img_size: int, batch_size: int
    ) -> None:
        self._model, self._files, self._side, self._batch = model, files, img_size, batch_size
        self._classes = sorted({path.parent for path in files})
        parameters = dict(model.network.named_parameters())
        in_fp32 = summed_in_fp32(parameters, heads)
        self.buckets = build_buckets(parameters, _BUCKET_BYTES, 1, _LAST_BUCKET_BYTES, in_fp32)

    def train(self, steps: int) -> float:
        """Take steps of AdamW, each on images of its own; return the mean loss of the last few."""
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=_LEARNING_RATE, weight_decay=0.05)
        losses = [float(self._loss(0, self._batch, "bf16"))]
        for step in range(steps):
            optimizer.zero_grad()
            loss = self._loss(step * _TRAINING_BATCH, _TRAINING_BATCH, "bf16")
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss))
        return fmean(losses[-_LAST_LOSSES:])

    def build_buckets(self, rank: int, precision: str) -> None:
        """Compute the gradients of one rank's images into the buckets."""
        self._model.zero_grad()
        self._loss(rank * self._batch, self._batch, precision).backward()  # type: ignore[no-untyped-call]
        for bucket in self.buckets:
            for name, parameter in bucket.parameters.items():
                if parameter.grad is not None:
                    bucket.view(bucket.gradients, name).copy_(parameter.grad)

    def _loss(self, first: int, number: int, precision: str) -> Tensor:
        chosen = [self._files[place % len(self._files)] for place in range(first, first + number)]
        images = torch.stack([self._image(path) for path in chosen])
        classes = torch.tensor([self._classes.index(path.parent) for path in chosen])
        with autocast(precision, _CPU):
            loss: Tensor = self._model(images, classes)
        return loss

    def _image(self, path: Path) -> Tensor:
        with Image.open(path) as opened:
            pixels = opened.convert("RGB").resize((self._side, self._side), Image.Resampling.BICUBIC)
        image = torch.from_numpy(np.asarray(pixels, dtype=np.float32)).permute(2, 0, 1)
        return (image - 120.0) / 60.0


class Sum(NamedTuple):
    """The sum of one bucket's gradients over ranks."""

    add: Callable[[Tensor], object]  # the gradients of one more rank, which stay as they are
    average: Callable[[], Tensor]  # after all ranks were added


class _Exchange:
    """The all-reduce of all buckets in one form on one number of ranks."""

    def __init__(self, ranks: int, form: str, buckets: list[Bucket], maxima: Tensor) -> None:
        self.ranks, self.form = ranks, form
        self._buckets = buckets
        self._sums = [
            SUMS["exact" if form == "fp16" and not bucket.compressible else form](bucket, ranks, maximum)
            for bucket, maximum in zip(buckets, maxima, strict=True)
        ]

    def add(self) -> None:
        """Add the gradients in the buckets, of one more rank."""
        for bucket, total in zip(self._buckets, self._sums, strict=True):
            total.add(bucket.gradients)

    def averages(self) -> dict[str, Tensor]:
        """Return the averaged gradients by name."""
        found = [(bucket, total.average()) for bucket, total in zip(self._buckets, self._sums, strict=True)]
        return {name: bucket.view(average, name) for bucket, average in found for name in bucket.parameters}


def _plain_sum(bucket: Bucket, ranks: int, _: Tensor, dtype: torch.dtype) -> Sum:
    """Gradients are converted to a type and added in it."""
    total = torch.zeros_like(bucket.gradients, dtype=dtype)
    return Sum(lambda gradients: total.add_(gradients.to(dtype)), lambda: total.float() / ranks)


def _factors(bucket: Bucket, ranks: int, maximum: Tensor, *, adaptive: bool = True) -> BucketScales:
    factors = BucketScales(1, ranks, like=bucket.gradients, adaptive=adaptive)
    factors.maxima.fill_(maximum)
    factors.update()
    return factors


def _fp16_sum(bucket: Bucket, ranks: int, factors: BucketScales) -> Sum:
    """The trainer's own compression, around an all-reduce that adds up what it is given."""
    total = torch.zeros_like(bucket.gradients, dtype=torch.float16)
    own = torch.zeros_like(bucket.gradients)
    receive: list[Wait] = []

    def allreduce(tensor: Tensor, name: str) -> Callable[[], Tensor]:  # noqa: ARG001
        total.add_(tensor)
        return lambda: total

    compression = Fp16Compression(NoCompression(own, own, allreduce, ranks, "bucket"), factors, 0)

    def add(gradients: Tensor) -> None:
        own.copy_(gradients)
        compression.compress_bucket()
        receive[:] = [compression.launch()]

    def average() -> Tensor:
        receive[0]()
        return own

    return Sum(add, average)


def _followed_sum(bucket: Bucket, ranks: int, maximum: Tensor) -> Sum:
    return _fp16_sum(bucket, ranks, _factors(bucket, ranks, maximum))


def _fixed_sum(bucket: Bucket, ranks: int, maximum: Tensor) -> Sum:
    return _fp16_sum(bucket, ranks, _factors(bucket, ranks, maximum, adaptive=False))


def _sum_of_halves(bucket: Bucket, ranks: int, maximum: Tensor) -> Sum:
    """The rounding error of the first fp16 message is sent in a second of the same size."""
    factors = _factors(bucket, ranks, maximum)
    high = _fp16_sum(bucket, ranks, factors)
    low = _fp16_sum(bucket, ranks, _factors(bucket, ranks, maximum * 2**-11))

    def add(gradients: Tensor) -> None:
        high.add(gradients)
        factor = factors.scale[0]
        low.add(gradients - (gradients * factor).half().float() / factor)

    return Sum(add, lambda: high.average() + low.average())


SUMS: dict[str, Callable[[Bucket, int, Tensor], Sum]] = {
    "exact": partial(_plain_sum, dtype=torch.float32),
    "fp16": _followed_sum,  # as the trainer does: vectors and heads in fp32
    "fp16-all": _followed_sum,  # vectors and heads too
    "fp16-fixed": _fixed_sum,
    "fp16-halves": _sum_of_halves,
    "bf16": partial(_plain_sum, dtype=torch.bfloat16),
}


def _figures(exchanges: list[_Exchange], bf16_errors: dict[str, float]) -> Iterator[Figure]:
    yield Figure("least error of a tensor by bf16 arithmetic", 100 * min(bf16_errors.values()), "%")
    exact: dict[str, Tensor] = {}
    for exchange in exchanges:
        found = exchange.averages()
        if exchange.form == "exact":
            exact = {name: average for name, average in found.items() if average.any()}
            continue
        errors = {name: _relative_error(found[name], right) for name, right in exact.items()}
        zeros = max(float(((found[name] == 0) & (exact[name] != 0)).float().mean()) for name in exact)
        worst = max(errors, key=lambda name: errors[name])
        above = sum(error > bf16_errors[name] for name, error in errors.items())
        what = f"{exchange.ranks} ranks, {exchange.form}"
        yield Figure(f"{what}: largest error, {worst}", 100 * errors[worst], "%")
        yield Figure(f"{what}: largest share that becomes zero", 100 * zeros, "%")
        yield Figure(f"{what}: tensors above bf16 arithmetic's error", above, "")


def _relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _errors_of_bf16(source: _GradientSource) -> dict[str, float]:
    """Return the relative error of each tensor's mean over a few ranks, computed in bf16 instead of fp32."""
    sums = {kind: [torch.zeros_like(b.gradients) for b in source.buckets] for kind in ("bf16", "fp32")}
    for precision, totals in sums.items():
        for rank in range(_RANKS_OF_BF16):
            source.build_buckets(rank, precision)
            for total, bucket in zip(totals, source.buckets, strict=True):
                total += bucket.gradients
    return {
        name: _relative_error(bucket.view(lower, name), bucket.view(exact, name))
        for lower, exact, bucket in zip(sums["bf16"], sums["fp32"], source.buckets, strict=True)
        for name in bucket.parameters
        if bucket.view(exact, name).any()
    }


def _mean_maxima(source: _GradientSource) -> Tensor:
    """Return the mean over a few ranks of the maximum in each bucket."""
    maxima = torch.zeros(len(source.buckets))
    for rank in range(_RANKS_OF_MAXIMA):
        source.build_buckets(rank, "bf16")
        maxima += torch.stack([bucket.gradients.abs().max() for bucket in source.buckets])
    return maxima / _RANKS_OF_MAXIMA
