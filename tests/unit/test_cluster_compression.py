"""fp16 compression preserves fp32 gradients at any number of ranks, and its sums are finite.

Ranks are emulated: each has its own compression, and the buffers are added in fp16 one after the other, as
in a ring allreduce. Tests with real ranks are in tests/ranks.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from horovod_volo.cluster.buckets import summed_in_fp32
from horovod_volo.cluster.compression import BucketScales, Fp16Compression
from horovod_volo.models.build import build_model, spec_of

RANKS = pytest.mark.parametrize("ranks", [2, 40, 256])
BF16_ROUNDING = 2.0**-9  # largest relative error of rounding to bf16
HALF_A_UNIT = 2.0**-11  # largest relative error of rounding to fp16; equal values all round the same way


class EmulatedRanks:
    """Ranks with one bucket each, reduced step by step."""

    def __init__(self, ranks: int, elements: int) -> None:
        self.ranks = ranks
        self.gradients = [torch.zeros(elements) for _ in range(ranks)]
        self.scales = [BucketScales(torch.zeros(1), ranks, adaptive=True) for _ in range(ranks)]
        self.sums = {"": torch.zeros(elements), ".fp16": torch.zeros(elements, dtype=torch.float16)}
        self.names: list[str] = []
        self.compressions = [
            Fp16Compression(own, own, self._reduce_async, ranks, "bucket", scales=scales, number=0)
            for own, scales in zip(self.gradients, self.scales, strict=True)
        ]

    def _reduce_async(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        total = self.sums[name.removeprefix("bucket")]
        total += tensor
        self.names.append(name)
        return lambda: total

    def step(self, local: list[Tensor]) -> Tensor:
        """Return the average that rank 0 receives; all ranks must receive the same."""
        for total in self.sums.values():
            total.zero_()
        waits = []
        for rank, compression in enumerate(self.compressions):
            gradient = local[rank].clone()
            if compression.compresses_per_gradient:
                compression.compress_gradient(compression.buffer, gradient)
            else:
                self.gradients[rank].copy_(gradient)
                compression.compress_bucket()
            waits.append(compression.launch())
        for wait in waits:
            wait()
        mean = torch.stack([scales.maxima for scales in self.scales]).mean(dim=0)
        for scales in self.scales:
            scales.maxima.copy_(mean)
            scales.update()
        assert all(own.equal(self.gradients[0]) or own.isnan().any() for own in self.gradients)
        return self.gradients[0].clone()


def small_beside_large(ranks: int, seed: int) -> list[Tensor]:
    """Draw the gradients of a bucket whose second half is 10^4 times smaller, as in VOLO's outlookers."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.cat([1e-3 * torch.randn(500, generator=random), 1e-7 * torch.randn(500, generator=random)])
        for _ in range(ranks)
    ]


@RANKS
def test_small_gradients_do_not_underflow_beside_large_ones(ranks: int) -> None:
    """The first step is not compressed."""
    emulated = EmulatedRanks(ranks, 1000)
    # Each addition rounds the partial sum; the error grows with the square root of the number of ranks.
    of_fp16 = BF16_ROUNDING * max(1.0, (ranks / 40) ** 0.5)
    for seed, name, limit in ((0, "bucket", 1e-6), (1, "bucket.fp16", of_fp16)):
        local = small_beside_large(ranks, seed)
        found, exact = emulated.step(local), torch.stack(local).double().mean(dim=0)
        assert emulated.names[-ranks:] == [name] * ranks
        for part in (slice(0, 500), slice(500, 1000)):
            error = (found[part] - exact[part]).norm() / exact[part].norm()
            assert error < limit, float(error)
    assert (found[500:] == 0).float().mean() < 0.01


@RANKS
@pytest.mark.parametrize("growth", [30.0, 1e30])
def test_no_growth_overflows(ranks: int, growth: float) -> None:
    """All ranks have the same gradient, which is the worst case for the sum."""
    emulated = EmulatedRanks(ranks, 100)
    local = [torch.linspace(-1e-2, 1e-2, 100)] * ranks
    for _ in range(2):
        before = emulated.step(local)
    found = emulated.step([growth * own for own in local])
    assert found.isfinite().all()
    assert torch.equal(found.sign(), before.sign())
    if growth == 30.0:  # within the headroom, no value is clamped
        assert torch.allclose(found, growth * before, rtol=ranks * HALF_A_UNIT)
    for _ in range(25):  # clamped values are in range again after some steps
        found = emulated.step([min(growth, 1e6) * own for own in local])
    assert torch.allclose(found, min(growth, 1e6) * before, rtol=ranks * HALF_A_UNIT)


def test_a_bucket_may_have_no_gradient_in_a_step() -> None:
    """Its buffer is set to 0 then, and nothing is compressed."""
    emulated = EmulatedRanks(2, 10)
    for _ in range(2):
        emulated.step([torch.ones(10)] * 2)
    emulated.compressions[0].launch()
    assert emulated.scales[0].maxima == 0


def test_scales_are_powers_of_two_and_their_inverse_is_exact() -> None:
    scales = BucketScales(torch.zeros(6), 3, adaptive=True)
    scales.maxima.copy_(torch.tensor([1e-25, 1e-7, 0.3, 1.0, 7e4, 1e30]))
    scales.update()
    mantissas, _ = torch.frexp(scales.scale)
    assert (mantissas == 0.5).all()
    assert torch.equal(scales.inverse_scale, 1.0 / (3 * scales.scale))
    reach = scales.scale.squeeze(1) * 3 * scales.running_maxima
    assert ((reach > 2.0**7) & (reach < 2.0**9)).all()


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("steps", [0, 2], ids=["sum in fp32", "sum in fp16"])
def test_a_maximum_is_finite_only_if_the_gradients_are(steps: int, number: float) -> None:
    """A gradient that overflows fp16 alone is clamped, and its maximum is that of clamped values."""
    emulated = EmulatedRanks(2, 10)
    for _ in range(steps):
        emulated.step([torch.ones(10)] * 2)
    for factor, finite in ((1e30, True), (number, False)):
        local = torch.ones(10)
        local[3] *= factor
        own = emulated.compressions[1]
        emulated.gradients[1].copy_(local)
        own.compress_bucket()
        own.launch()
        assert bool(emulated.scales[1].maxima.isfinite()) == finite


@pytest.mark.parametrize(
    ("name", "heads"), [("volo_demo", {"head.weight", "aux_head.weight"}), ("resnet18", {"fc.weight"})]
)
def test_vectors_and_heads_are_summed_in_fp32(name: str, heads: set[str]) -> None:
    with torch.device("meta"):
        parameters = dict(build_model(name, img_size=224, num_classes=1000, drop_path=0.0).named_parameters())
    chosen = summed_in_fp32(parameters, spec_of(name).heads)
    assert {n for n in chosen if parameters[n].dim() > 1} == heads
    assert all(parameters[n].dim() > 1 for n in parameters.keys() - chosen)
    with pytest.raises(ValueError, match=r"no parameter belongs to the heads network\.head"):
        summed_in_fp32({"head.weight": torch.zeros(2, 2)}, ["network.head"])
