"""The shards of all ranks together are the network. Tests with real ranks are in tests/ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_volo.cluster.collectives import Collectives
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.sharding import ShardedReducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.optim.build import OPTIMIZERS, build_optimizer, parameter_groups, set_lr, state_tensors


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 3))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def optimizer_of(model: nn.Module, reducer: Reducer) -> Any:
    parameters = dict(model.named_parameters())
    groups = parameter_groups(
        parameters, reducer.local_parameters, exempt=(), weight_decay=0.1, layers={}, layer_decay=1.0
    )
    optimizer = build_optimizer("adamw", groups, momentum=0.0)
    set_lr(optimizer, 0.01)
    return optimizer


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_shards_of_all_ranks_are_the_parameters(ranks: int) -> None:
    expected = {name: p.detach().clone() for name, p in network().named_parameters()}
    pieces: dict[str, list[Tensor]] = {name: [] for name in expected}
    elements = []
    for rank in range(ranks):
        model = network()
        world = World(rank=rank, size=ranks, collectives=Collectives())
        reducer = ShardedReducer(model, world, Exchange(compression="none", bucket_mib=1e-3), micro_batches=1)
        if rank >= 5:  # their shards are padding, and an optimizer needs a parameter
            (padding,) = reducer.local_parameters.values()
            assert not padding.any()
            continue
        elements.append(sum(piece.numel() for piece in reducer.local_parameters.values()))
        for name, piece in reducer.local_parameters.items():
            pieces[name].append(piece.detach())
    for name, whole in expected.items():
        in_memory_order = whole.as_strided((whole.numel(),), (1,))
        assert torch.equal(torch.cat(pieces[name]), in_memory_order), name
    assert sum(elements) == sum(tensor.numel() for tensor in expected.values())


def test_the_messages_of_the_state_are_as_many_as_the_buckets() -> None:
    messages: list[int] = []

    class CountedGathers(Collectives):
        def allgather_async(self, part: Tensor, name: str) -> Any:
            messages.append(len(part))
            return super().allgather_async(part, name)

    model, world = network(), World(collectives=CountedGathers())
    reducer = ShardedReducer(model, world, Exchange(compression="none", bucket_mib=1e-3), micro_batches=1)
    state = state_tensors(optimizer_of(model, reducer), reducer.local_parameters)
    assert reducer.gather_optimizer_state(state, OPTIMIZERS.find("adamw").state_keys).keys() == state.keys()
    assert len(messages) == len(reducer.buckets) == 3
    padded = sum(len(bucket.weights) for bucket in reducer.buckets)
    assert sum(messages) == 2 * padded + len(reducer.local_parameters)
