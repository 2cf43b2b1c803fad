"""What fp16 compression makes of gradients, tensor by tensor, beside what computing in bf16 makes of them.

Ranks beyond those at hand are emulated: each one's gradient is of images of its own, and the sum is taken in
the arithmetic of the exchange, one rank after the other, as a ring does for each part of a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from horovod_volo.bench.exchanges import Lesson
from horovod_volo.bench.results import Figure, Result
from horovod_volo.cluster.buckets import Bucket, build_buckets
from horovod_volo.cluster.collectives import Wait
from horovod_volo.cluster.compression import BucketScales, Fp16Compression, NoCompression, summed_in_fp32
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model
from horovod_volo.models.precision import autocast, fix_convolutions

_CPU = torch.device("cpu")
_BUCKET_BYTES, _LAST_BUCKET_BYTES = 25 * 2**20, 2**20
_RANKS_OF_HISTORY = 4  # whose maxima stand for those of the step before
_RANKS_OF_BOUND = 4  # over which the error of bf16 arithmetic is averaged
_TRAINING_BATCH, _LEARNING_RATE, _LAST_LOSSES = 16, 5e-4, 10


def measure(
    *,
    model: str,
    img_size: int,
    batch_size: int,
    ranks: Sequence[int],
    data_dir: str,
    classes: int,
    steps: int,
    forms: Sequence[str],
) -> Result:
    """Compare forms of the exchange on the weights that a network has after so many steps of training."""
    torch.manual_seed(0)
    files = _files(data_dir)
    folders = len({path.parent for path in files})
    if classes < folders:
        raise UserError(f"{data_dir} has {folders} classes. Use --classes {folders} or more.")
    network = build_model(model, img_size=img_size, num_classes=classes, drop_path=0.0).train()
    fix_convolutions(network, "bf16", _CPU)
    work = _Work(network, files, img_size, batch_size)
    loss = work.train(steps)
    buckets = work.buckets
    bound, maxima = _error_of_bf16(work), _mean_maxima(work)
    cases = [Case(number, form, buckets, maxima) for number in ranks for form in ("exact", *forms)]
    for number in range(max(ranks)):
        work.build_buckets(number, "bf16")
        for case in cases:
            if number < case.ranks:
                case.add()
    title = (
        f"gradients of {batch_size} images a rank, {img_size} px, bf16, after {steps} steps: loss {loss:.2f}"
    )
    return Result(f"compression {model} {steps} steps", title, [*_figures(cases, bound, len(buckets))])


class _Work:
    """A network, images, and the gradients of each rank's own images."""

    def __init__(self, network: nn.Module, files: list[Path], img_size: int, batch_size: int) -> None:
        self._lesson = Lesson(network)
        self._files, self._side, self._batch = files, img_size, batch_size
        self._classes = sorted({path.parent for path in files})
        parameters = dict(network.named_parameters())
        self.buckets = build_buckets(
            parameters, _BUCKET_BYTES, 1, _LAST_BUCKET_BYTES, summed_in_fp32(parameters)
        )

    def train(self, steps: int) -> float:
        """Take so many steps of AdamW, each on images of its own; return the mean loss of the last few."""
        optimizer = torch.optim.AdamW(self._lesson.parameters(), lr=_LEARNING_RATE, weight_decay=0.05)
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
        self._lesson.zero_grad()
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
            loss: Tensor = self._lesson(images, classes)
        return loss

    def _image(self, path: Path) -> Tensor:
        with Image.open(path) as opened:
            pixels = opened.convert("RGB").resize((self._side, self._side), Image.Resampling.BICUBIC)
        image = torch.from_numpy(np.asarray(pixels, dtype=np.float32)).permute(2, 0, 1)
        return (image - 120.0) / 60.0


def _files(data_dir: str) -> list[Path]:
    """Return the training images, in a random order that is the same every time."""
    files = sorted(path for path in Path(data_dir, "train").glob("*/*") if path.is_file())
    if not files:
        raise UserError(f"There are no images in {data_dir}/train/CLASS/. Give --data-dir.")
    return [files[place] for place in np.random.default_rng(0).permutation(len(files))]


class Case:
    """One form of the exchange on one number of ranks."""

    def __init__(self, ranks: int, form: str, buckets: list[Bucket], maxima: Tensor) -> None:
        self.ranks, self.form = ranks, form
        self._buckets = buckets
        self._sums = [
            (FORMS[form] if bucket.compressible or form != "fp16" else FORMS["exact"])(
                bucket, ranks, maxima[number]
            )
            for number, bucket in enumerate(buckets)
        ]

    def add(self) -> None:
        """Add the gradients that lie in the buckets, of one more rank."""
        for bucket, total in zip(self._buckets, self._sums, strict=True):
            total.add(bucket.gradients)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averaged gradients by name."""
        averages = [total.average() for total in self._sums]
        return {
            name: bucket.view(average, name)
            for bucket, average in zip(self._buckets, averages, strict=True)
            for name in bucket.parameters
        }


class Sum(Protocol):
    """The sum of one bucket's gradients over ranks, in one form of the exchange."""

    def add(self, gradients: Tensor) -> None:
        """Add those of one more rank; the tensor given is left as it is."""

    def average(self) -> Tensor:
        """Return the average over all ranks, once they are added."""


class _PlainSum:
    """Rounded to a type before it is added, and added in that type."""

    def __init__(self, bucket: Bucket, ranks: int, maximum: Tensor, dtype: torch.dtype) -> None:  # noqa: ARG002
        self._total, self._ranks = torch.zeros_like(bucket.gradients, dtype=dtype), ranks

    def add(self, gradients: Tensor) -> None:
        self._total += gradients.to(self._total.dtype)

    def average(self) -> Tensor:
        return self._total.float() / self._ranks


class _Fp16Sum:
    """The trainer's own compression, around an exchange that adds up what it is given."""

    def __init__(self, bucket: Bucket, ranks: int, maximum: Tensor, *, adaptive: bool) -> None:
        self._total = torch.zeros_like(bucket.gradients, dtype=torch.float16)
        self._gradients = torch.zeros_like(bucket.gradients)
        self.factors = BucketScales(1, ranks, like=bucket.gradients, adaptive=adaptive)
        self.factors.maxima.fill_(maximum)
        self.factors.update()
        plain = NoCompression(self._gradients, self._gradients, self._exchange, ranks, "bucket")
        self._compression = Fp16Compression(plain, self.factors, 0)
        self._receive: Wait = lambda: None

    def _exchange(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:  # noqa: ARG002
        self._total += tensor
        return lambda: self._total

    def add(self, gradients: Tensor) -> None:
        self._gradients.copy_(gradients)
        self._compression.pack()
        self._receive = self._compression.send()

    def average(self) -> Tensor:
        self._receive()
        return self._gradients


class _TwoHalves:
    """What rounding to fp16 leaves is sent in a second message of the same size."""

    def __init__(self, bucket: Bucket, ranks: int, maximum: Tensor) -> None:
        self._high = _Fp16Sum(bucket, ranks, maximum, adaptive=True)
        self._low = _Fp16Sum(bucket, ranks, maximum * 2**-11, adaptive=True)

    def add(self, gradients: Tensor) -> None:
        self._high.add(gradients)
        factor = self._high.factors.forward[0]
        self._low.add(gradients - (gradients * factor).half().float() / factor)

    def average(self) -> Tensor:
        return self._high.average() + self._low.average()


FORMS: dict[str, Callable[[Bucket, int, Tensor], Sum]] = {
    "exact": partial(_PlainSum, dtype=torch.float32),
    "fp16": partial(_Fp16Sum, adaptive=True),  # as the trainer does: vectors and heads in fp32
    "fp16-all": partial(_Fp16Sum, adaptive=True),  # and these too
    "fp16-fixed": partial(_Fp16Sum, adaptive=False),
    "fp16-halves": _TwoHalves,
    "bf16": partial(_PlainSum, dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Errors:
    """How far a form is from the exact average."""

    largest: float  # of a tensor: norm of the difference over norm of the exact
    name: str  # of that tensor
    zeros: float  # largest share of a tensor's elements that became zero
    beyond: int  # tensors whose error is above that of bf16 arithmetic


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor], bound: dict[str, float]) -> Errors:
    errors, zeros = {}, []
    for name, tensor in exact.items():
        norm = tensor.norm()
        if norm > 0:
            errors[name] = float((found[name] - tensor).norm() / norm)
            zeros.append(float(((found[name] == 0) & (tensor != 0)).float().mean()))
    worst = max(errors, key=lambda name: errors[name])
    beyond = sum(error > bound[name] for name, error in errors.items())
    return Errors(errors[worst], worst, max(zeros), beyond)


def _figures(cases: list[Case], bound: dict[str, float], buckets: int) -> Iterator[Figure]:
    yield Figure("buckets", buckets, "")
    yield Figure("least error of a tensor by bf16 arithmetic", 100 * min(bound.values()), "%")
    exact: dict[str, Tensor] = {}
    for case in cases:
        if case.form == "exact":
            exact = case.tensors()
            continue
        errors = _errors(case.tensors(), exact, bound)
        what = f"{case.ranks} ranks, {case.form}"
        yield Figure(f"{what}: largest error, {errors.name}", 100 * errors.largest, "%")
        yield Figure(f"{what}: largest share that becomes zero", 100 * errors.zeros, "%")
        yield Figure(f"{what}: tensors above bf16 arithmetic's error", errors.beyond, "")


def _error_of_bf16(work: _Work) -> dict[str, float]:
    """Return each tensor's relative error of computing its average over a few ranks in bf16, not fp32."""
    sums = {
        precision: [torch.zeros_like(b.gradients) for b in work.buckets] for precision in ("bf16", "fp32")
    }
    for precision, totals in sums.items():
        for rank in range(_RANKS_OF_BOUND):
            work.build_buckets(rank, precision)
            for total, bucket in zip(totals, work.buckets, strict=True):
                total += bucket.gradients
    found = {}
    for lower, exact, bucket in zip(sums["bf16"], sums["fp32"], work.buckets, strict=True):
        for name in bucket.parameters:
            right = bucket.view(exact, name)
            if right.any():
                found[name] = float((bucket.view(lower, name) - right).norm() / right.norm())
    return found


def _mean_maxima(work: _Work) -> Tensor:
    """Return the mean over a few ranks of each bucket's maximum."""
    maxima = torch.zeros(len(work.buckets))
    for rank in range(_RANKS_OF_HISTORY):
        work.build_buckets(rank, "bf16")
        maxima += torch.stack([bucket.gradients.abs().max() for bucket in work.buckets])
    return maxima / _RANKS_OF_HISTORY
