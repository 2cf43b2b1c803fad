"""The fused clipping, AdamW and EMA equal torch's own functions, called one after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.optim.build import build_optimizer, parameter_groups, set_lr
from horovod_volo.optim.clip import build_clip, divide
from horovod_volo.optim.ema import Ema

BOUND, WEIGHT_DECAY, EMA_DECAY, LR, STEPS = 0.35, 0.05, 0.9, 1e-3, 20


class TwoUpdates:
    """Two equal models, one updated as in a run, the other by torch's own functions."""

    def __init__(self, device: torch.device, scale: float) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 20, 3, bias=False), nn.BatchNorm2d(20), nn.Flatten(), nn.Linear(20, 300)
        )
        self.ours = model.to(device).train()
        self.theirs = copy.deepcopy(self.ours)
        self.mean = [parameter.detach().clone() for parameter in self.theirs.parameters()]
        self.reducer = Reducer(
            self.ours, World.single(), Exchange(compression="none", bucket_mib=0.01), micro_batches=1
        )
        named = dict(self.ours.named_parameters())
        groups = parameter_groups(
            named, named, exempt=(), weight_decay=WEIGHT_DECAY, layers={}, layer_decay=1.0
        )
        self.optimizer = build_optimizer("adamw", groups, momentum=0.0)
        set_lr(self.optimizer, LR)
        self.clip = build_clip(
            "norm",
            BOUND,
            named,
            flat_gradients=self.reducer.local_gradients,
            heads=(),
            global_grad_norm=self.reducer.global_grad_norm,
        )
        self.average = Ema(self.ours, self.reducer.buckets, EMA_DECAY)
        self.scaler = torch.amp.GradScaler(device.type, enabled=scale != 1.0, init_scale=scale)
        self.peer = torch.optim.AdamW(self._peer_groups(), lr=LR, betas=(0.9, 0.999), eps=1e-8)
        self._device = device

    def _peer_groups(self) -> list[dict[str, object]]:
        plain = [parameter for parameter in self.theirs.parameters() if parameter.ndim == 1]
        others = [parameter for parameter in self.theirs.parameters() if parameter.ndim > 1]
        return [{"params": plain, "weight_decay": 0.0}, {"params": others, "weight_decay": WEIGHT_DECAY}]

    def backward(self, step: int) -> None:
        images = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(step)).to(self._device)
        self.scaler.scale(self.ours(images).square().mean()).backward()
        self.theirs(images).square().mean().backward()

    def our_update(self) -> None:
        with self.reducer.synchronized_gradients():
            self.scaler.unscale_(self.optimizer)
            divide(self.optimizer, self.clip())
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.average.update(step=0)  # without warm-up the step does not matter

    def their_update(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.theirs.parameters(), BOUND)
        self.peer.step()
        self.peer.zero_grad()
        for mean, parameter in zip(self.mean, self.theirs.parameters(), strict=True):
            mean.mul_(EMA_DECAY).add_(parameter.detach(), alpha=1 - EMA_DECAY)
        return norm


@pytest.mark.parametrize("scale", [1.0, 256.0], ids=["fp32", "scaled"])
def test_twenty_steps_give_the_same_weights_and_averages(device: torch.device, scale: float) -> None:
    updates = TwoUpdates(device, scale)
    assert len(updates.reducer.buckets) > 1
    start = [parameter.detach().clone() for parameter in updates.ours.parameters()]
    norms = []
    for step in range(STEPS):
        updates.backward(step)
        updates.our_update()
        norms.append(updates.their_update())
    assert min(norms) < BOUND < max(norms)  # some steps are clipped, others are not
    averages = updates.average.models()["ema"].parameters()
    for ours, average, theirs, mean, before in zip(
        updates.ours.parameters(), averages, updates.theirs.parameters(), updates.mean, start, strict=True
    ):
        assert (ours - before).abs().max() > LR
        assert (ours - theirs).abs().max() <= 1e-6
        assert (average - mean).abs().max() <= 1e-6
