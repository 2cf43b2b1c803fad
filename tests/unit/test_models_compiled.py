"""--compile compiles each class of blocks once, with unchanged results and gradients ready block by block."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model, training_forward
from horovod_volo.models.compiled import compile_blocks, find_blocks
from horovod_volo.models.volo import Volo

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def network(drop_path: float = 0.0, *, grad_checkpoint: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return build_model(
        "volo_demo", img_size=32, num_classes=5, drop_path=drop_path, grad_checkpoint=grad_checkpoint
    ).train()


def compile_counter() -> CompileCounterWithBackend:
    """Return a backend that counts compilations and runs the traced operations with bit-identical results."""
    torch._dynamo.reset()
    return CompileCounterWithBackend("aot_eager")


def backward(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a forward and backward with fixed drop path."""
    torch.manual_seed(2)
    class_logits, token_logits = training_forward(model)(IMAGES, lambda tokens: tokens, 2)
    (class_logits.square().sum() + token_logits.square().sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "blocks"), [("volo_d1", 20), ("lvvit_t", 12), ("resnet18", 8), ("vit_tiny_patch16_224", 12)]
)
def test_all_blocks_are_found(name: str, blocks: int) -> None:
    with torch.device("meta"):
        model = build_model(name, img_size=224, num_classes=5, drop_path=0.0)
    found = list(find_blocks(model))
    assert len(found) == blocks
    inside = {id(part) for block in found for part in block.modules()}
    assert sum(id(module) in inside for module in model.modules()) == len(inside)  # no block is found twice
    weights = sum(p.numel() for block in found for p in block.parameters())
    assert weights > 0.8 * sum(p.numel() for p in model.parameters())


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="Sequential has none"):
        compile_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_gradients_are_those_of_the_uncompiled_network(grad_checkpoint: bool) -> None:
    plain, counter = network(0.3), compile_counter()
    compiled = network(0.3, grad_checkpoint=grad_checkpoint)
    compile_blocks(compiled, counter)
    expected, found = backward(plain), backward(compiled)
    assert counter.frame_count > 0
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_a_class_is_compiled_once_and_evaluation_not_at_all() -> None:
    model, counter = network(), compile_counter()
    names = list(model.state_dict())
    averaged = copy.deepcopy(model)
    compile_blocks(model, counter)
    backward(model)
    blocks = list(find_blocks(model))
    shapes = {(type(each), *(p.shape for p in each.parameters())) for each in [*blocks, model.patch_embed]}
    assert counter.frame_count == len(shapes) < len(blocks)
    assert list(model.state_dict()) == names
    backward(model)
    backward(averaged)
    model.eval()(IMAGES)
    assert counter.frame_count == len(shapes)


@pytest.mark.parametrize(("rate", "graphs", "varying"), [(0.1, 4, 0), (0.75, 6, 2)])
def test_blocks_of_a_kind_have_one_graph_on_a_gpu(rate, graphs, varying, monkeypatch):
    """And the stem; at high rates of drop path also branches of a varying number of images."""
    monkeypatch.setattr("horovod_volo.models.blocks._masked_below", lambda _: 0.25)
    torch.manual_seed(0)
    layers = {"layers": (4, 4, 8, 2), "embed_dims": (48, 96, 96, 96), "num_heads": (2, 4, 4, 4)}
    model = Volo(img_size=32, num_classes=5, drop_path=rate, **layers).train()
    counter = compile_counter()
    compile_blocks(model, counter)
    images = torch.randn(8, 3, 32, 32)
    for seed in range(12):
        model.training_logits(images, lambda tokens: tokens, seed)[1].square().sum().backward()
        if seed == 3:
            first = counter.frame_count
    assert counter.frame_count == first == graphs
    inputs = [graph.graph.find_nodes(op="placeholder") for graph in counter.graphs]
    sizes = [sum(isinstance(node.meta["example_value"], torch.SymInt) for node in nodes) for nodes in inputs]
    assert sorted(sizes) == [0] * (graphs - varying) + [1] * varying  # the number of images alone


def test_gradients_of_a_block_are_ready_before_backward_of_the_next() -> None:
    model, counter = network(), compile_counter()
    compile_blocks(model, counter)
    backward(model)  # compiles
    blocks, events = list(find_blocks(model)), []
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, n=number: events.append(n))
        block.register_full_backward_pre_hook(lambda *_, n=number: events.append(f"begins {n}"))
    backward(model)
    for number in range(1, len(blocks)):
        last_ready = max(position for position, event in enumerate(events) if event == number)
        assert last_ready < events.index(f"begins {number - 1}"), events
