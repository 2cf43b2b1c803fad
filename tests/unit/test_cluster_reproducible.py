"""Fixed-point sums round less than fp16 messages do, and say when they have overflowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from horovod_volo.cluster.buckets import build_gradient_buckets
from horovod_volo.cluster.compression import BucketScales, Fp16Compression
from horovod_volo.cluster.reproducible import ReproducibleReducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.models.build import build_model, spec_of, training_forward

MOST_RANKS = 256
HEADS = spec_of("volo_demo").heads
Gradients = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def gradients() -> Gradients:
    """Return the gradients of a VOLO in as many micro-batches as there may be ranks."""
    torch.manual_seed(0)
    network = build_model("volo_demo", img_size=32, num_classes=10, drop_path=0.0)
    forward, found = training_forward(network.train()), []
    for _ in range(MOST_RANKS):
        network.zero_grad()
        classes, tokens = forward(torch.randn(2, 3, 32, 32), lambda grid: grid, 0)
        (classes[:, 3].logsumexp(0) - classes.logsumexp(1).mean() + tokens[..., 1].square().mean()).backward()
        found.append({name: each.grad.clone() for name, each in network.named_parameters()})
    return found


def fp16_average(by_rank: Gradients) -> dict[str, Tensor]:
    """Return the averages of the compressible gradients, of emulated ranks that add in fp16 in a ring."""
    averages, parameters = {}, {name: nn.Parameter(each) for name, each in by_rank[0].items()}
    for bucket in build_gradient_buckets(parameters, Exchange(), heads=HEADS, ranks=len(by_rank)):
        if bucket.compressible:
            flats = [torch.cat([own[name].flatten() for name in bucket.parameters]) for own in by_rank]
            scales = BucketScales(torch.zeros(1), len(by_rank), adaptive=True)
            scales.maxima.copy_(torch.stack([flat.abs().max() for flat in flats]).mean())
            scales.update()
            total = torch.zeros_like(flats[0], dtype=torch.float16)

            def add(tensor: Tensor, name: str, total: Tensor = total) -> Callable[[], Tensor]:
                total += tensor
                return lambda: total

            for flat in flats:
                message = Fp16Compression(flat, flat, add, len(by_rank), "bucket", scales=scales, number=0)
                message.compress_gradient(message.buffer, flat)
                wait = message.launch()
            wait()
            sizes = [each.numel() for each in bucket.parameters.values()]
            averages |= dict(zip(bucket.parameters, flats[-1].split(sizes), strict=True))
    return averages


def reducer_of(parameters: dict[str, Tensor], micro_batches: int, **options: bool) -> ReproducibleReducer:
    network = nn.Module()
    for name, each in parameters.items():
        network.register_parameter(name.replace(".", "/"), nn.Parameter(each.clone()))
    counts = {"micro_batches": micro_batches, "of_all_ranks": micro_batches}
    return ReproducibleReducer(network, World.single(), Exchange(), **counts, **options)


def step(reducer: ReproducibleReducer, micro_batches: Gradients) -> dict[str, Tensor]:
    """Return the averages of gradients, which are those of a loss that is linear in its parameters."""
    parameters = reducer.local_parameters
    for own in micro_batches:
        loss = sum((parameters[name.replace(".", "/")] * each).sum() for name, each in own.items())
        loss.backward()
        reducer.statistics.add_micro_batch(torch.zeros(()))
    with reducer.synchronized_gradients():
        return {name.replace("/", "."): each.grad.clone() for name, each in parameters.items()}


@pytest.mark.parametrize("ranks", [2, 8, 40, MOST_RANKS])
def test_each_gradient_has_a_smaller_error_than_in_fp16(gradients, ranks):
    by_rank = gradients[:ranks]
    reducer = reducer_of(by_rank[0], ranks)
    step(reducer, by_rank)  # with the first scales
    found, compressed, ratios = step(reducer, by_rank), fp16_average(by_rank), {}
    for name, average in compressed.items():
        exact = torch.stack([own[name] for own in by_rank]).double().mean(dim=0).flatten()
        error, of_fp16 = ((each.double() - exact).norm() for each in (found[name].flatten(), average))
        ratios[name] = float(error / of_fp16)
    worst = max(ratios, key=lambda name: ratios[name])
    print(f"{ranks} ranks: errors are at most {ratios[worst]:.4f} of those in fp16, of {worst}")
    assert len(ratios) > 20
    assert ratios[worst] < 1


def test_an_overflow_is_seen_and_gives_the_next_step_more_range():
    parameters = {"weight": torch.ones(3), "other": torch.ones(2)}
    reducer = reducer_of(parameters, 2)
    usual = {"weight": torch.tensor([0.5, -1e-3, 0.0]), "other": torch.tensor([2.0, 1.0])}
    for _ in range(2):
        assert torch.allclose(step(reducer, [usual, usual])["weight"], usual["weight"], rtol=1e-3)
        assert reducer.statistics.finite
    large = usual | {"weight": 10_000 * usual["weight"]}
    step(reducer, [usual, large])
    (*_, outcome) = reducer.statistics.outcomes(of_all=True)
    assert not outcome.finite
    assert "outgrown" in outcome.fault()
    assert torch.allclose(step(reducer, [usual, large])["weight"], 5000.5 * usual["weight"], rtol=1e-3)
    step(reducer, [usual, usual | {"other": torch.tensor([torch.inf, 0.0])}])
    (*_, outcome) = reducer.statistics.outcomes(of_all=True)
    assert "gradients are not finite" in outcome.fault()
    assert torch.allclose(step(reducer, [usual, usual])["other"], usual["other"], rtol=1e-3)


def test_an_overflow_of_a_scaled_loss_is_left_to_the_gradient_scaler():
    reducer = reducer_of({"weight": torch.ones(3)}, 1, loss_is_scaled=True)
    for number in (torch.inf, 1.0, torch.inf, torch.inf, torch.inf):
        found = step(reducer, [{"weight": 65536 * torch.tensor([number, 1.0, 0.0])}])
        assert reducer.statistics.finite
        assert bool(found["weight"].isfinite().all()) == (number == 1.0)


def test_a_gradient_that_was_0_for_long_does_not_overflow():
    reducer = reducer_of({"weight": torch.ones(3)}, 1)
    for number in (1.0, *[0.0] * 1000, 1.0):
        step(reducer, [{"weight": torch.tensor([number, 0.0, 0.0])}])
        assert reducer.statistics.finite


def test_the_norm_is_that_of_the_averages():
    parameters = {f"part_{number}": torch.randn(5, number + 1) * 10.0**-number for number in range(8)}
    reducer = reducer_of(parameters, 1)
    step(reducer, [parameters])
    found = step(reducer, [parameters])
    with reducer.synchronized_gradients():
        for name, each in reducer.local_parameters.items():
            each.grad.copy_(found[name])
        norm = reducer.global_grad_norm(torch.zeros(()))
        assert torch.allclose(norm, torch.cat([each.flatten() for each in found.values()]).norm(), rtol=1e-6)
