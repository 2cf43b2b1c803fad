"""Loading weights: all file formats, resizing to another input size, and errors where they do not fit."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_samples import without_aux_head
from safetensors.torch import save_file
from torch import Tensor

from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model
from horovod_volo.models.volo import Volo, resize_position_embedding
from horovod_volo.models.weights import load_weights, read_weights

State = dict[str, Tensor]
ALL_LOADED = f"{len(build_model('volo_demo', img_size=32, num_classes=2, drop_path=0.0).state_dict())} of "
ALL_LOADED += ALL_LOADED.removesuffix(" of ") + " tensors loaded"


def demo(*, img_size: int = 64, num_classes: int = 10, seed: int = 0) -> Volo:
    torch.manual_seed(seed)
    return build_model("volo_demo", img_size=img_size, num_classes=num_classes, drop_path=0.0)


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Fitting weights to a network


def resized(grid: Tensor, rows: int, columns: int) -> Tensor:
    """Resize (1, rows, columns, channels) as the published fine-tuning does."""
    channels_first = grid.permute(0, 3, 1, 2)
    return F.interpolate(channels_first, size=(rows, columns), mode="bicubic").permute(0, 2, 3, 1)


@pytest.mark.parametrize(("was", "new"), [((14, 14), (24, 24)), ((14, 14), (8, 8)), ((4, 6), (6, 9))])
def test_position_embeddings_are_resized_bicubically(was: tuple[int, int], new: tuple[int, int]) -> None:
    embedding = torch.randn(1, *was, 3, generator=torch.Generator().manual_seed(0))
    found = resize_position_embedding(embedding, was, new)
    assert torch.equal(found, resized(embedding, *new))
    first = torch.ones(1, 1, 3)
    with_class_token = torch.cat([first, embedding.flatten(1, 2)], dim=1)
    expected = torch.cat([first, found.flatten(1, 2)], dim=1)
    assert torch.equal(resize_position_embedding(with_class_token, was, new), expected)


def test_weights_of_another_input_size_load_with_the_embedding_resized() -> None:
    source, target = demo().state_dict(), demo(img_size=96, seed=1)
    messages = load_weights(target, "volo_demo", source, "some.pth")
    assert messages == [ALL_LOADED, "position embedding resized from 4 x 4 to 6 x 6"]
    expected = dict(source) | {"pos_embed": resize_position_embedding(source["pos_embed"], (4, 4), (6, 6))}
    assert same(target.state_dict(), expected)
    assert source["pos_embed"].shape == (1, 4, 4, 96)  # the given weights are unchanged


def changed(state: State, **entries: Tensor) -> State:
    return state | {name.replace("__", "."): tensor for name, tensor in entries.items()}


def without(state: State, name: str) -> State:
    return {key: tensor for key, tensor in state.items() if key != name}


def small() -> State:
    return dict(demo().state_dict())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (without(small(), "norm.weight"), r"1 missing \(first: norm.weight\). Check --model"),
        (changed(small(), extra=torch.zeros(1)), r"1 unknown \(first: extra\)"),
        (changed(small(), norm__weight=torch.zeros(1)), r"1 of another shape \(first: norm.weight\)"),
        # A plain transformer of the same width, whose embedding is a sequence of tokens instead of a grid.
        (changed(small(), pos_embed=torch.zeros(1, 17, 96)), r"1 of another shape \(first: pos_embed\)"),
        ({}, "missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused(state: State, message: str) -> None:
    target = demo(seed=1)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(UserError, match=f"weights in some.pth .*{message}"):
        load_weights(target, "volo_demo", state, "some.pth")
    assert same(target.state_dict(), before)


def test_heads_of_other_classes_are_initialized() -> None:
    source, target = demo(num_classes=7).state_dict(), demo(seed=1)
    fresh = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    messages = load_weights(target, "volo_demo", source, "some.pth")
    assert messages[1:] == [
        "aux_head, head are initialized: the weights are for 7 classes, the images have 10"
    ]
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, fresh[name] if "head" in name else source[name]), name
    # If only one head has other classes, the weights are not of another data set but wrong.
    odd = small() | {"head.weight": torch.zeros(7, 96), "head.bias": torch.zeros(7)}
    with pytest.raises(UserError, match=r"2 of another shape \(first: head.weight\)"):
        load_weights(target, "volo_demo", odd, "some.pth")


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t"])
def test_a_network_without_an_auxiliary_head_ignores_one(name: str) -> None:
    source = build_model(name, img_size=32, num_classes=10, drop_path=0.0).state_dict()
    target = build_model(name, img_size=32, num_classes=10, drop_path=0.0, aux_head=False)
    messages = load_weights(target, name, source, "some.pth")
    assert messages[1:] == ["aux_head is left out: without token labels it is neither trained nor evaluated"]
    assert same(target.state_dict(), without_aux_head(source))


def test_an_auxiliary_head_that_the_weights_lack_is_initialized() -> None:
    source, target = without_aux_head(small()), demo(seed=1)
    fresh = target.aux_head.weight.clone()
    messages = load_weights(target, "volo_demo", source, "some.pth")
    assert messages[1:] == ["aux_head is initialized: the weights have none"]
    assert same(without_aux_head(target.state_dict()), source)
    assert torch.equal(target.aux_head.weight, fresh)
    half = without(small(), "aux_head.bias")
    with pytest.raises(UserError, match=r"1 missing \(first: aux_head.bias\)"):
        load_weights(target, "volo_demo", half, "some.pth")


def test_only_named_differences_are_allowed() -> None:
    target = demo(seed=1)
    fresh = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    state = changed(without(small(), "norm.weight"), extra=torch.zeros(1), norm__bias=torch.zeros(5))
    with pytest.raises(UserError, match=r"1 unknown .* with --allow-mismatch"):
        load_weights(target, "volo_demo", state, "some.pth", allowed="norm")
    assert same(target.state_dict(), fresh)
    messages = load_weights(target, "volo_demo", state, "some.pth", allowed="norm, extra")
    assert messages[1:] == [
        "1 tensors missing, as allowed: norm.weight",
        "1 tensors unknown, as allowed: extra",
        "1 tensors of another shape, as allowed: norm.bias",
    ]
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, fresh[name] if name.startswith("norm.") else state[name]), name


@pytest.mark.parametrize("side", [4, 6])
def test_a_sequence_of_tokens_without_a_class_token_becomes_a_grid(side: int) -> None:
    """As in the published code, (1, 196, channels) becomes 14 x 14."""
    source, target = small(), demo(seed=1)
    row = torch.randn(1, side * side, 96, generator=torch.Generator().manual_seed(0))
    messages = load_weights(target, "volo_demo", source | {"pos_embed": row}, "some.pth")
    assert messages[1] == f"position embedding laid out as {side} x {side} tokens"
    assert messages[2:] == ([] if side == 4 else ["position embedding resized from 6 x 6 to 4 x 4"])
    grid = row.reshape(1, side, side, 96)
    assert torch.equal(target.pos_embed, grid if side == 4 else resized(grid, 4, 4))


def test_timms_networks_are_adapted_as_timm_does() -> None:
    name = "vit_tiny_patch16_224"
    source = build_model(name, img_size=64, num_classes=7, drop_path=0.0).state_dict()
    target = build_model(name, img_size=96, num_classes=10, drop_path=0.0)
    messages = load_weights(target, name, source, "some.pth")
    assert messages[1:] == ["head are initialized: the weights are for 7 classes, the images have 10"]
    assert torch.equal(target.state_dict()["blocks.3.mlp.fc1.weight"], source["blocks.3.mlp.fc1.weight"])
    expected = build_model(name, img_size=64, num_classes=7, drop_path=0.0)
    expected.load_state_dict(source)
    expected.set_input_size(img_size=(96, 96))
    torch.testing.assert_close(target.state_dict()["pos_embed"], expected.state_dict()["pos_embed"])


# Reading files


STATE: State = {"head.weight": torch.arange(6.0).view(2, 3), "norm.running": torch.tensor(3)}
PREFIXED = {f"module.{name}": tensor for name, tensor in STATE.items()}


@pytest.mark.parametrize(
    "content",
    [
        STATE,
        PREFIXED,
        {"state_dict": STATE, "epoch": 3},
        {"state_dict": PREFIXED},
        {"model": STATE},
        {"state_dict": STATE, "state_dict_ema": {"head.weight": torch.zeros(1)}},
        {"state_dict_ema": STATE},
        # As the published training code saves it, with its settings and the optimizer's state.
        {
            "arch": "volo_d1",
            "args": argparse.Namespace(lr=1e-3),
            "optimizer": {"state": {}},
            "state_dict": STATE,
        },
    ],
    ids=["plain", "module", "state_dict", "both", "model", "raw and ema", "ema", "published"],
)
def test_torch_files_of_every_kind(content: dict[str, Any], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pth.tar")
    assert same(read_weights(str(tmp_path / "weights.pth.tar")).tensors, STATE)


def test_of_a_checkpoint_the_raw_weights_are_the_default(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "best"
    write(checkpoint / "model.safetensors", 1)
    assert read_weights(str(tmp_path)).messages == []
    torch.save({"state_dict": STATE}, tmp_path / "weights.pth")
    for source in (str(tmp_path), str(tmp_path / "weights.pth"), "timm:volo_d1_224"):
        with pytest.raises(UserError, match=r"There are no averaged weights \(EMA\) in .*Drop --use-ema\."):
            read_weights(source, use_ema=True)
    write(checkpoint / "ema.safetensors", 2)
    write(checkpoint / "optimizer.safetensors", 3)
    raw = "raw weights (model.safetensors); --use-ema loads the averaged weights (EMA, ema.safetensors)"
    averaged = "averaged weights (EMA, ema.safetensors)"
    for source, use_ema, number, messages in (
        (tmp_path, False, 1, [raw]),
        (tmp_path, True, 2, [averaged]),
        (checkpoint, True, 2, [averaged]),
        (checkpoint / "model.safetensors", False, 1, [raw]),
        (checkpoint / "model.safetensors", True, 2, [averaged]),
        (checkpoint / "ema.safetensors", False, 2, [averaged]),
        (checkpoint / "optimizer.safetensors", False, 3, []),
    ):
        found = read_weights(str(source), use_ema=use_ema)
        assert (float(found.tensors["number"]), found.messages) == (number, messages)


def write(path: Path, number: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"number": torch.tensor(number)}
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)


def test_the_weights_in_a_folder_are_found(tmp_path: Path) -> None:
    """Each file written below takes precedence over those written before it."""
    run = tmp_path / "run"
    write(run / "downloaded.pth", 1)
    assert read_weights(str(run)).tensors["number"] == 1
    write(run / "checkpoints" / "step_00000002" / "model.safetensors", 2)
    (run / "checkpoints" / "last").symlink_to("step_00000002")
    assert read_weights(str(run)).tensors["number"] == 2
    write(run / "checkpoints" / "step_00000001" / "model.safetensors", 3)
    (run / "checkpoints" / "best").symlink_to("step_00000001")
    assert read_weights(str(run)).tensors["number"] == 3
    assert read_weights(str(run / "checkpoints" / "last")).tensors["number"] == 2
    write(run / "model.safetensors", 4)
    assert read_weights(str(run)).tensors["number"] == 4


def test_a_path_without_exactly_one_file_of_weights_is_refused(tmp_path: Path) -> None:
    for source, message in ((tmp_path / "nowhere", "no weights at"), (tmp_path, "holds 0 files of weights")):
        with pytest.raises(UserError, match=message):
            read_weights(str(source))
    write(tmp_path / "one.pth", 1)
    write(tmp_path / "two.safetensors", 2)
    with pytest.raises(UserError, match="holds 2 files of weights"):
        read_weights(str(tmp_path))


@pytest.mark.parametrize("name", ["broken.pth", "broken.safetensors"])
@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"cut"], ids=["empty", "garbage", "cut"])
def test_a_damaged_file_is_one_error_message(name: str, content: bytes, tmp_path: Path) -> None:
    write(tmp_path / name, 1)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-1] if content == b"cut" else content)
    with pytest.raises(UserError, match=f"{name} cannot be read as weights") as raised:
        read_weights(str(tmp_path / name))
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "content",
    [torch.zeros(3), [torch.zeros(3)], {3: torch.zeros(3)}]
    + [{"state_dict": STATE | {"odd": value}} for value in (3, None, {"a": torch.zeros(1)})]
    + [STATE | {"odd": odd} for odd in (torch.eye(3).to_sparse(), torch.empty(3, device="meta"))]
    + [STATE | {"odd": torch.eye(3).to(dtype)} for dtype in (torch.complex64, torch.int8)],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # since PyTorch 2.14
def test_a_file_without_a_state_dict_of_dense_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "odd.pth")
    problem = "odd in .*odd.pth is not a dense tensor"
    if not isinstance(content, dict) or not isinstance(content.get("odd"), Tensor):
        problem = "odd.pth holds no state_dict"
    with pytest.raises(UserError, match=problem) as raised:
        read_weights(str(tmp_path / "odd.pth"))
    assert str(raised.value).isprintable()


class Malicious:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    torch.save({"state_dict": STATE, "args": Malicious(tmp_path / "executed")}, tmp_path / "bad.pth")
    with pytest.raises(UserError, match="objects other than tensors"):
        read_weights(str(tmp_path / "bad.pth"))
    assert not (tmp_path / "executed").exists()
