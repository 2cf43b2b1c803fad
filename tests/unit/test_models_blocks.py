"""Outlook attention equals timm's, dropped branches are not computed, recomputing changes no result."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise

import numpy as np
import pytest
import torch
from network_samples import random_images, small_lvvit, unchanged
from torch import Tensor, nn

# The reference is timm's module. timm_api comes first, because timm imports torchvision.
from horovod_volo.kernels import outlook_gather
from horovod_volo.models import timm_api
from horovod_volo.models.blocks import ALL, DropPathSample, sample_drop_path
from horovod_volo.models.build import build_model, training_forward
from horovod_volo.models.compiled import find_blocks
from horovod_volo.models.lvvit import LvVit
from horovod_volo.models.outlook import Outlook, outlook, plain_outlook
from horovod_volo.models.volo import Volo

assert timm_api
from timm.models.volo import OutlookAttention  # noqa: E402

SIZES = [(8, 8), (7, 9), (4, 11), (1, 1), (1, 6), (2, 3)]
GEOMETRIES = [(3, 1, 2), (3, 1, 1), (5, 2, 3), (1, 0, 1), (5, 2, 2)]  # kernel, padding, stride


def pair(heads: int, kernel: int, padding: int, stride: int, dtype: torch.dtype) -> tuple[nn.Module, Outlook]:
    torch.manual_seed(0)
    theirs = OutlookAttention(6 * heads, heads, kernel, padding, stride, qkv_bias=True).to(dtype)
    return theirs, Outlook(copy.deepcopy(theirs))


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def value_and_gradients(module: nn.Module, pixels: Tensor) -> list[Tensor]:
    value = module(pixels)
    weights = drawn(*value.shape, dtype=value.dtype, seed=2).detach()
    return [value, *torch.autograd.grad(value, [pixels, *module.parameters()], weights)]


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(("kernel", "padding", "stride"), GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_timms(height, width, kernel, padding, stride, dtype) -> None:
    for heads in (1, 3):
        theirs, ours = pair(heads, kernel, padding, stride, dtype)
        pixels = drawn(2, 6 * heads, height, width, dtype=dtype).permute(0, 2, 3, 1)  # a view
        tolerance = {"rtol": 1e-5, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
        expected, found = value_and_gradients(theirs, pixels), value_and_gradients(ours, pixels)
        torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_half_precision_adds_only_its_own_rounding(dtype: torch.dtype, tolerance: float) -> None:
    values, scores = drawn(2, 6, 5, 8).to(dtype), drawn(2, 3, 3, 2 * 81).to(dtype)
    found = outlook(values, scores, [3, 3, 2, 3, 1, 2], 0.7)
    exact = plain_outlook(values.double(), scores.double(), [3, 3, 2, 3, 1, 2], 0.7)
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= tolerance * exact.abs().max()


def test_large_scores_do_not_overflow() -> None:
    values, scores = drawn(1, 4, 4, 8), 1e4 * drawn(1, 2, 2, 2 * 81)
    found = outlook(values.float(), scores.float(), [2, 2, 2, 3, 1, 2], 0.7)
    exact = plain_outlook(values, scores.float().double(), [2, 2, 2, 3, 1, 2], 0.7)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("images", [0, 1, 5])
def test_images_are_the_same_some_at_a_time_and_alone(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = pair(3, 3, 1, 2, torch.float64)
    pixels = drawn(images, 6, 5, 18)
    alone = [value_and_gradients(module, each[None]) for each in pixels.detach().requires_grad_()]
    monkeypatch.setattr(outlook_gather, "_CHUNK_WEIGHTS", 2 * 9 * 9 * 3 * 9)  # two images of 3 x 3 windows
    value, of_pixels, *_ = value_and_gradients(module, pixels)
    assert value.shape == of_pixels.shape == pixels.shape
    for number, (own_value, *_) in enumerate(alone):
        torch.testing.assert_close(value[number], own_value[0], rtol=1e-12, atol=1e-12)


def test_the_operation_is_registered_correctly_for_the_compiler() -> None:
    values, scores = drawn(2, 4, 5, 4, dtype=torch.float32), drawn(2, 2, 3, 2 * 81, dtype=torch.float32)
    operation = torch.ops.horovod_volo.outlook_gather.default
    torch.library.opcheck(operation, (values, scores, [2, 3, 2, 3, 1, 2], 0.7))


def rows_of(sample: DropPathSample, batch: int) -> list[int]:
    return list(range(batch)) if sample.rows is None else sample.rows.tolist()


@pytest.mark.parametrize("rows", [[0, 2, 3], [4], [3, 1, 4, 0, 2], []])
def test_results_and_gradients_equal_the_masked_form(rows: list[int]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    tokens = torch.randn(5, 3, 6, requires_grad=True)
    grad_output = torch.randn(5, 3, 6)
    mask = torch.zeros(5, 1, 1).index_fill_(0, torch.tensor(rows, dtype=torch.int64), 1.0)
    usual = tokens + layer(tokens) * mask * 4.0
    ours = DropPathSample(torch.tensor(rows, dtype=torch.int64), 4.0).added(tokens, layer)
    torch.testing.assert_close(ours, usual)
    inputs = [tokens, *layer.parameters()]
    expected = torch.autograd.grad((usual * grad_output).sum(), inputs)
    found = torch.autograd.grad((ours * grad_output).sum(), inputs, allow_unused=not rows)
    for grad, expected_grad in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.zeros_like(expected_grad) if grad is None else grad, expected_grad)


def test_each_image_keeps_a_branch_with_the_set_probability() -> None:
    batch, rates, draws = 6, [0.0, 0.1, 0.45, 0.9], 4000
    times = np.zeros((len(rates), batch))
    for seed in range(draws):
        for number, sample in enumerate(sample_drop_path(rates, torch.empty(batch), seed)):
            times[number, rows_of(sample, batch)] += 1
    for rate, of_images in zip(rates, times / draws, strict=True):
        spread = np.sqrt(rate * (1 - rate) / draws)
        assert np.abs(of_images - (1 - rate)).max() <= 4.5 * spread


def test_ranks_drop_nearly_equal_numbers_of_branches() -> None:
    counts = [
        [len(rows_of(sample, 7)) for sample in sample_drop_path([0.3] * 5, torch.empty(7), seed)]
        for seed in range(200)
    ]
    assert {count for row in counts for count in row} == {4, 5}  # 4.9 on average


def test_samples_depend_on_the_seed_alone() -> None:
    other_seed = count()

    def drawn(seed: int) -> list[list[int]]:
        torch.manual_seed(next(other_seed))
        return [rows_of(sample, 16) for sample in sample_drop_path([0.5] * 8, torch.empty(16), seed)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert all(first != second for first, second in pairwise(drawn(3)))


def test_kept_branches_are_scaled_up() -> None:
    (sample,) = sample_drop_path([0.75], torch.empty(8), 0)
    assert sample.scale == pytest.approx(4.0)
    assert len(rows_of(sample, 8)) == 2
    assert sample_drop_path([0.0, 0.0], torch.empty(8), None) == [ALL, ALL]


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t", "resnet18"])
def test_a_network_drops_branches_in_training_only(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, img_size=64, num_classes=10, drop_path=0.6)
    for parameter in model.parameters():  # timm initializes residual branches to zero
        parameter.data.add_(0.01)

    def logits(seed: int) -> Tensor:
        return training_forward(model)(random_images(4, 64), unchanged, seed)[0]

    model.train()
    assert torch.equal(logits(2**63 + 1), logits(2**63 + 1))
    assert not torch.equal(logits(2**63 + 1), logits(2))
    model.eval()
    assert torch.equal(logits(1), logits(2))


Model = Volo | LvVit


def volo(drop_path: float) -> Volo:
    """Build a small network with two blocks in some stages."""
    sizes = {"layers": (2, 2, 1, 1), "embed_dims": (48, 96, 96, 96), "num_heads": (2, 4, 4, 4)}
    return Volo(stem_hidden_dim=8, img_size=64, num_classes=10, drop_path=drop_path, **sizes)


IMAGES = random_images(6, 64)


def loss_of(model: Model, drop_path_seed: int = 0) -> Tensor:
    class_logits, token_logits = model.training_logits(
        IMAGES, lambda grid: torch.cat([grid[:, :2].flip(0), grid[:, 2:]], dim=1), drop_path_seed
    )
    return class_logits.float().square().mean() + token_logits.float().square().mean()


def training_step(
    build: Callable[[float], Model], drop_path: float, checkpointing: bool, seed: int, precision: torch.dtype
) -> list[Tensor]:
    """Return the loss, all gradients, all buffers and the random state after one forward and backward."""
    torch.manual_seed(0)
    model = build(drop_path).train()
    model.set_grad_checkpointing(checkpointing)
    with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
        loss = loss_of(model, seed)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [loss, *gradients, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drop_path", [0.0, 0.6])
@pytest.mark.parametrize("build", [volo, small_lvvit])
def test_nothing_changes_to_the_bit(build, drop_path, precision):
    plain = training_step(build, drop_path, False, 1, precision)
    recomputed = training_step(build, drop_path, True, 1, precision)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))
    # Other dropped branches would change the loss by as much as this.
    other_branches = training_step(build, drop_path, True, 5, precision)
    assert torch.equal(plain[0], other_branches[0]) == (drop_path == 0.0)


@contextmanager
def calls(modules: list[nn.Module]) -> Iterator[Counter[nn.Module]]:
    """Count the forward calls of each module inside the context."""
    counts: Counter[nn.Module] = Counter()
    hooks = [module.register_forward_pre_hook(lambda each, _: counts.update([each])) for module in modules]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("build", [volo, small_lvvit])
def test_only_blocks_are_computed_twice(build: Callable[[float], Model]) -> None:
    model = build(0.0).train()
    blocks = list(find_blocks(model))
    others = [model.patch_embed, model.norm, model.head, model.aux_head]
    others += [model.network[1]] if isinstance(model, Volo) else []
    model.set_grad_checkpointing()
    with calls(blocks) as of_blocks, calls(others) as of_others:
        loss_of(model).backward()
    assert of_blocks == Counter(2 * blocks)
    assert of_others == Counter(others)
    plain = model.eval()(IMAGES)
    with calls(blocks) as of_blocks:  # evaluation repeats nothing, nor does training without checkpointing
        model(IMAGES).sum().backward()
    assert of_blocks == Counter(blocks)
    model.set_grad_checkpointing(False)
    assert torch.equal(model(IMAGES), plain)
    with calls(blocks) as of_blocks:
        loss_of(model.train()).backward()
    assert of_blocks == Counter(blocks)
