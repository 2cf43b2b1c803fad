"""With one rank the reducer changes where gradients are stored, not their values.

With several, collectives that complete late, in any order and on another thread, give the same gradients:
Horovod completes messages in the order that the ranks agree on, and may read and write a tensor at any time
between the launch and the wait. `LateCollectives` does both as late as possible, in random order.
"""

import copy
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from horovod_volo.cluster.buckets import build_gradient_buckets
from horovod_volo.cluster.collectives import Collectives, WaitForResult
from horovod_volo.cluster.compression import scale_into
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.sharding import ShardedReducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange


@pytest.fixture(params=["one by one", "at once"], autouse=True)
def _copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy gradients into the buckets as on a CPU, and as on a GPU."""
    if request.param == "at once":
        monkeypatch.setattr("horovod_volo.cluster.reducer.on_cpu", lambda _: False)


class SmallNetwork(nn.Module):
    """A network with batch norm, a weight that is used twice, a frozen one and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Parameter(torch.randn(3))
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.stem(images)).relu().mean(dim=(2, 3))  # (batch, 8)
        return self.head(self.frozen(self.mix(self.mix(features))))  # type: ignore[no-any-return]


def loss(model: nn.Module, seed: int) -> Tensor:
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return model(images).square().mean()  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**20], ids=["each", "some", "one"])
@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_bit_identical_to_autograds(micro_batches, compression, bucket_bytes):
    plain = SmallNetwork().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    reduced = copy.deepcopy(plain)
    settings = Exchange(compression=compression, bucket_mib=bucket_bytes / 2**20)
    reducer = Reducer(reduced, World.single(), settings, micro_batches=micro_batches)
    for step in range(2):  # twice: the second step must not contain gradients of the first
        plain.zero_grad()
        for number in range(micro_batches):
            loss(plain, 10 * step + number).backward()  # type: ignore[no-untyped-call]
            loss(reduced, 10 * step + number).backward()  # type: ignore[no-untyped-call]
        expected = gradients(plain)
        with reducer.synchronized_gradients():
            found = gradients(reduced)
        assert set(found) == set(expected) | {"unused"}
        assert found["unused"].tolist() == [0.0, 0.0, 0.0]
        for name in expected:
            assert torch.equal(found[name], expected[name]), name
            assert found[name].stride() == reduced.get_parameter(name).stride(), name
        assert not found["stem.weight"].is_contiguous()
        assert all(parameter.any() for parameter in expected.values())
        assert gradients(reduced) == {}, "autograd must not accumulate"
    for name, buffer in plain.named_buffers():
        assert torch.equal(reduced.get_buffer(name), buffer), name


@pytest.mark.parametrize("last_bytes", [64, 300, 2**20])
def test_buckets_grow_from_a_small_last_one(last_bytes: int) -> None:
    sizes = [40, 25, 30, 60, 35, 10, 50, 20, 45, 15, 55, 70, 5]  # elements of 4 bytes
    names = [f"layer{number}" for number in range(len(sizes))]
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in zip(names, sizes, strict=True)}
    settings = Exchange(bucket_mib=600 / 2**20, last_bucket_mib=last_bytes / 2**20)
    buckets = build_gradient_buckets(parameters, settings)
    assert [name for bucket in buckets for name in bucket.parameters] == names[::-1]
    bound = min(last_bytes, 600)
    for number, bucket in enumerate(reversed(buckets)):
        used = sum(4 * parameter.numel() for parameter in bucket.parameters.values())
        assert used <= bound or len(bucket.parameters) == 1
        bound = min(4 * bound, 600)
        if number + 1 < len(buckets):  # the next parameter would not have fitted
            next_parameter = list(buckets[-2 - number].parameters.values())[-1]
            assert used + 4 * next_parameter.numel() > min(last_bytes * 4**number, 600)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("layers", [4, 40])
def test_one_allreduce_per_bucket_and_one_for_statistics(layers: int, micro_batches: int) -> None:
    names: list[str] = []

    class RecordedAllreduces(Collectives):
        def allreduce_async(self, tensor: Tensor, name: str, scale: float = 1.0) -> WaitForResult:
            names.append(name)
            return super().allreduce_async(tensor, name, scale)

    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)), nn.BatchNorm1d(6))
    settings = Exchange(bucket_mib=1200 / 2**20, last_bucket_mib=200 / 2**20)
    reducer = Reducer(model, World(collectives=RecordedAllreduces()), settings, micro_batches=micro_batches)
    in_order = [f"bucket.{number}" for number in range(len(reducer.buckets))]
    assert len(in_order) < layers
    for _ in range(2):
        for _ in range(micro_batches):
            assert names == [], "no bucket is launched before the last micro-batch"
            model(torch.randn(5, 6)).square().sum().backward()
        assert names == in_order, "all buckets are launched when backward ends"
        with reducer.synchronized_gradients():
            assert names == [*in_order, "statistics"]
        names.clear()


@pytest.mark.parametrize("factor", [1.0, 0.5, 2 / 3])
@pytest.mark.parametrize("types", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_scaling_rounds_once(types: tuple[torch.dtype, torch.dtype], factor: float) -> None:
    source, target = torch.randn(1000).to(types[0]), torch.zeros(1000, dtype=types[1])
    expected = (source.float() * factor).to(types[1])
    scale_into(target, source, torch.tensor([factor]))
    assert torch.equal(target, expected)
    large = torch.tensor([98_304.0])
    half = torch.zeros(1, dtype=torch.float16)
    scale_into(half, large, torch.tensor([0.5]))
    assert half.item() == 49_152.0, "the product is cast to fp16, not the source"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_one_backward_pass_too_many_is_an_error(micro_batches: int) -> None:
    model = SmallNetwork()
    model.unused.requires_grad_(False)
    settings = Exchange(bucket_mib=300 / 2**20)
    reducer = Reducer(model, World.single(), settings, micro_batches=micro_batches)
    for number in range(micro_batches):
        loss(model, number).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="more backward passes than the reducer was built for"):
        loss(model, micro_batches).backward()  # type: ignore[no-untyped-call]
    del reducer  # not before: without it nothing counts


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_that_backward_did_not_compute_is_reduced_too(micro_batches: int) -> None:
    model = nn.Linear(2, 2)
    reducer = Reducer(model, World.single(), Exchange(compression="none"), micro_batches=micro_batches)
    for step in (1.0, 2.0):
        model.weight.grad = torch.full((2, 2), step)
        with reducer.synchronized_gradients():
            assert model.weight.grad.tolist() == [[step, step], [step, step]]
            assert reducer.buckets[0].gradients.max() == step
            assert model.bias.grad.tolist() == [0.0, 0.0]


RANKS, STEPS = 2, 4
Operation = Callable[[], object]


class EqualRanks(Collectives):
    """The collectives of ranks that all have the values of this one."""

    def allreduce_async(self, tensor: Tensor, name: str, scale: float = 1.0) -> WaitForResult:
        return self.launch(lambda: tensor.mul_(RANKS * scale), tensor)

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> WaitForResult:
        part = torch.full_like(tensor[: len(tensor) // RANKS], torch.nan)
        return self.launch(lambda: part.copy_(RANKS * tensor[: len(part)]), part)

    def allgather_async(self, part: Tensor, name: str) -> WaitForResult:
        result = torch.full_like(part.repeat(RANKS), torch.nan)
        return self.launch(lambda: result.copy_(part.repeat(RANKS)), result)

    def launch(self, operation: Operation, result: Tensor) -> WaitForResult:
        """Run the operation at once."""
        operation()
        return lambda: result


class LateCollectives(EqualRanks):
    """Run the operations on another thread when the host first waits, in random order."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._random = random.Random(0)
        self._pending: list[tuple[Operation, threading.Event]] = []
        self.most_pending = 0

    def launch(self, operation: Operation, result: Tensor) -> WaitForResult:
        """Keep the operation until a wait."""
        done = threading.Event()
        self._pending.append((operation, done))
        self.most_pending = max(self.most_pending, len(self._pending))

        def wait() -> Tensor:
            self._random.shuffle(self._pending)
            for pending, finished in self._pending:
                self._thread.submit(self._run, pending, finished)
            self._pending.clear()
            assert done.wait(timeout=30)
            return result

        return wait

    @staticmethod
    def _run(operation: Operation, done: threading.Event) -> None:
        with torch.no_grad():
            operation()
        done.set()


def gradients_of_steps(
    collectives: EqualRanks, kind: type[Reducer], compression: Literal["none", "fp16"], micro_batches: int
) -> list[Tensor]:
    """Train a few steps of gradient descent; return the local gradients of each, and the last statistics."""
    model = SmallNetwork()
    settings = Exchange(compression=compression, bucket_mib=300 / 2**20)
    world = World(rank=0, size=RANKS, collectives=collectives)
    reducer = kind(model, world, settings, micro_batches=micro_batches)
    found = []
    for step in range(STEPS):
        for number in range(micro_batches):
            loss(model, 10 * step + number).backward()  # type: ignore[no-untyped-call]
        with reducer.synchronized_gradients(), torch.no_grad():
            found += [gradient.clone() for gradient in reducer.local_gradients]
            for parameter in reducer.local_parameters.values():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return [*found, *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("kind", [Reducer, ShardedReducer])
def test_late_completions_in_any_order_give_the_same_gradients(kind, compression, micro_batches):
    expected = gradients_of_steps(EqualRanks(), kind, compression, micro_batches)
    with ThreadPoolExecutor(1) as thread:
        late = LateCollectives(thread)
        found = gradients_of_steps(late, kind, compression, micro_batches)
    assert late.most_pending > 2
    assert all(tensor.isfinite().all() for tensor in found)
    for ours, right in zip(found, expected, strict=True):
        assert torch.equal(ours, right)
