"""Muon: orthogonalisation against the singular value decomposition, steps against their formula."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_optim_build import set_gradients
from torch import Tensor, nn

from horovod_volo.cluster.collectives import RankLostError
from horovod_volo.cluster.world import World
from horovod_volo.config.command_line import parse
from horovod_volo.core.errors import UserError
from horovod_volo.dry_run import dry_run
from horovod_volo.engine.state import build_state
from horovod_volo.engine.task import Network
from horovod_volo.models.build import build_model, exempt_from_decay, hidden_matrices, spec_of
from horovod_volo.optim.build import build_optimizer, parameter_groups, set_lr, state_tensors
from horovod_volo.optim.muon import OneRank, assign_matrices, matrix_flops, orthogonalize

Array = NDArray[np.float64]
MOMENTUM, DECAY = 0.9, 0.05


def by_decomposition(matrix: Array) -> Array:
    """Return the result of the iterations, computed on singular values."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values /= np.sqrt((values**2).sum()) or 1
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ np.diag(values) @ right


def random_matrices(count: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 7), (5, 5), (3, 64), (17, 31), (48, 48)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_iterations_act_on_singular_values(rows, columns, dtype, tolerance, size):
    matrices = (size * random_matrices(4, rows, columns)).to(dtype)
    matrices[1, : rows // 2] = matrices[1, -1]  # of a low rank
    matrices[2] = 0
    found = orthogonalize(matrices)
    assert found.dtype == dtype
    for one, matrix in zip(found, matrices, strict=True):
        expected = by_decomposition(matrix.double().numpy())
        np.testing.assert_allclose(one.double().numpy(), expected, rtol=0, atol=tolerance)
    assert not found[2].any()


@pytest.mark.parametrize("size", [1e-15, 1e-19, 1e-22, 1e-25, 1e-30, 1e-42])
def test_a_momentum_that_fades_away_gives_no_update_that_is_too_large(size: float) -> None:
    """As that of a layer that no longer gets gradients: the squares of its elements are 0 in fp32."""
    found = orthogonalize(size * random_matrices(2, 64, 128))
    assert torch.linalg.svdvals(found).max() < 1.14


class OddShapes(nn.Module):
    """Matrices of odd shapes, wide, tall and square, a filter, and parameters that are no hidden matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3)
        self.filter = nn.Conv2d(5, 7, 3)
        self.depthwise = nn.Conv2d(7, 7, 3, groups=7)
        self.upsample = nn.ConvTranspose2d(7, 7, 2)
        self.norm = nn.LayerNorm(7)
        self.tall, self.wide, self.square = nn.Linear(7, 19), nn.Linear(19, 7), nn.Linear(7, 7)
        self.like_tall = nn.Linear(19, 7, bias=False)  # transposed of the same shape
        self.gate = nn.Linear(7, 1)
        self.embedding = nn.Embedding(4, 7)
        self.head = nn.Linear(7, 4)


def groups(model: nn.Module, layers: dict[str, int] | None = None) -> list[dict[str, Any]]:
    parameters = dict(model.named_parameters())
    decays = {"weight_decay": DECAY, "layers": layers or {}, "layer_decay": 0.5 if layers else 1.0}
    matrices = hidden_matrices(model, ("head",))
    return parameter_groups(parameters, parameters, exempt=("embedding.weight",), matrices=matrices, **decays)


def test_hidden_matrices_map_features_to_features() -> None:
    names = hidden_matrices(OddShapes(), ("head",))
    assert names == {f"{name}.weight" for name in ("filter", "tall", "wide", "square", "like_tall")}


OF_TOKENS = {"pos_embed", "cls_token", "head.weight"}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("volo_demo", OF_TOKENS | {"patch_embed.conv.0.weight", "aux_head.weight"}),
        ("vit_tiny_patch16_224", OF_TOKENS | {"patch_embed.proj.weight"}),
        ("resnet18", {"conv1.weight", "fc.weight"}),
    ],
)
def test_stems_heads_and_embeddings_of_models_are_not_hidden(name: str, others: set[str]) -> None:
    model = build_model(name, img_size=32, num_classes=5, drop_path=0.0)
    hidden = hidden_matrices(model, spec_of(name).heads)
    assert {key for key, value in model.named_parameters() if value.ndim > 1} - hidden == others
    assert hidden.isdisjoint(exempt_from_decay(model))


def by_formula(weight: Array, gradients: list[Array], lrs: list[float]) -> Array:
    momentum = np.zeros_like(weight)
    for gradient, lr in zip(gradients, lrs, strict=True):
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        direction = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        matrix = direction.reshape(len(direction), -1)
        size = 0.2 * np.sqrt(max(matrix.shape))
        weight = weight - lr * DECAY * weight - lr * size * by_decomposition(matrix).reshape(weight.shape)
    return weight


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_steps_follow_the_formula(memory: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = OddShapes().double().to(memory_format=memory)
    layers = {name: int(name.startswith(("tall", "head"))) for name, _ in model.named_parameters()}
    plain = copy.deepcopy(model)
    hidden = hidden_matrices(model, ("head",))
    optimizer = build_optimizer("muon", groups(model, layers), momentum=MOMENTUM)
    of_adamw = [
        {
            "params": [parameter],
            "lr": 0.0,
            "weight_decay": 0.0 if parameter.ndim == 1 or name == "embedding.weight" else DECAY,
            "layer": layers[name],
        }
        for name, parameter in plain.named_parameters()
        if name not in hidden
    ]
    adamw = torch.optim.AdamW(of_adamw, betas=(0.9, 0.999), eps=1e-8)
    start = {name: model.get_parameter(name).detach().numpy().copy() for name in sorted(hidden)}
    gradients, lrs = [], [0.01, 0.02, 0.005, 0.01]
    for step, lr in enumerate(lrs):
        set_lr(optimizer, lr)
        for group in adamw.param_groups:
            group["lr"] = lr * (1.0 if group["layer"] else 0.5)
        set_gradients(model, step)
        set_gradients(plain, step)
        gradients.append({name: model.get_parameter(name).grad.numpy().copy() for name in start})
        optimizer.step()
        adamw.step()
    for name, parameter in plain.named_parameters():
        if name not in hidden:
            torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=1e-12)
    for name, weight in start.items():
        scaled = [lr * (1.0 if layers[name] else 0.5) for lr in lrs]
        expected = by_formula(weight, [of_step[name] for of_step in gradients], scaled)
        found = model.get_parameter(name).detach().numpy()
        assert np.abs(found - weight).max() > 1e-3
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9, err_msg=name)


class LostRank(OneRank):
    """A rank whose message does not arrive."""

    def concatenate_async(self, part: Tensor, name: str) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            raise RankLostError("rank 1 is lost")

        return wait


def test_a_step_in_which_a_rank_is_lost_changes_nothing() -> None:
    """An elastic run keeps the state after the last complete step, and takes this one again."""
    model = OddShapes()
    optimizer = build_optimizer("muon", groups(model), momentum=MOMENTUM)
    set_lr(optimizer, 1e-3)
    set_gradients(model, 0)
    optimizer.step()
    parameters = dict(model.named_parameters())
    live = {**parameters, **state_tensors(optimizer, parameters)}
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    optimizer.ranks = LostRank()  # type: ignore[attr-defined]
    set_gradients(model, 1)
    with pytest.raises(RankLostError):
        optimizer.step()
    assert [name for name, tensor in live.items() if not torch.equal(tensor, before[name])] == []


def test_frozen_matrices_stay() -> None:
    model = OddShapes()
    model.tall.weight.requires_grad_(False)
    before = model.tall.weight.clone()
    optimizer = build_optimizer("muon", groups(model), momentum=MOMENTUM)
    set_lr(optimizer, 1e-3)
    set_gradients(model, 0)
    model.tall.weight.grad = None
    optimizer.step()
    assert torch.equal(model.tall.weight, before)
    assert not optimizer.state[model.tall.weight]["momentum_buffer"].any()


FLOPS = [matrix_flops(8, 4)] * 5 + [matrix_flops(64, 16)] * 3 + [matrix_flops(33, 65)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("flops", [FLOPS, FLOPS[-1:], []], ids=["many", "one", "none"])
def test_each_matrix_has_one_rank_and_work_is_balanced(flops: list[int], ranks: int) -> None:
    found = assign_matrices(flops, ranks)
    assert len(found) == ranks
    assert sorted(number for of_rank in found for number in of_rank) == list(range(len(flops)))
    work = [sum(flops[number] for number in of_rank) for of_rank in found]
    assert max(work) <= sum(work) / ranks + max(flops, default=0)


def test_a_model_without_hidden_matrices_is_refused() -> None:
    network = Network(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), ("1",), nn.Identity(), lambda _: [])
    task: Any = SimpleNamespace(build=lambda *_: network)
    config = parse(["--opt", "muon", "--model", "linear"]).config
    with pytest.raises(UserError, match="linear has no hidden matrices for --opt muon"):
        build_state(config, World.single(), task, num_classes=5, device=torch.device("cpu"), finetune="")


def test_a_dry_run_counts_one_moment_of_matrices_and_the_message_of_updates() -> None:
    def properties(opt: str) -> tuple[float, float, float]:
        config = parse(["--model", "volo_d1", "--opt", opt, "--num-classes", "1000"]).config
        lines = dry_run(config, 2).splitlines()
        memory = next(line for line in lines if line.strip().startswith("memory")).split()
        exchange = next(line for line in lines if line.strip().startswith("exchange")).split()
        return float(memory[2]), float(exchange[1]), float(exchange[exchange.index("through") - 2])

    adamw, muon = properties("adamw"), properties("muon")
    assert muon[0] <= adamw[0] == pytest.approx(16 * 26.6e6 / 2**30, abs=0.06)
    assert muon[1] == adamw[1]
    assert muon[2] == pytest.approx(adamw[2] + 25.7e6 * 2 / 2 / 2**20, abs=1.1)
