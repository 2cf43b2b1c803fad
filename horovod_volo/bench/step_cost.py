"""The operators of a training step on a GPU, counted on the meta device with their bytes and operations.

An operator reads each input and writes each output once, and takes the longest of three times: that of its
bytes, of its matrix products, and of its instructions, where these are known from the compiled program. They
are priced at the best rates of a GPU, and at usual ones, with the time between kernels. Nothing is measured.
BatchNorm reads its inputs twice: it cannot normalise the first element before it has seen the last. Attention
fills tiles of 128 tokens, and its widths are multiples of 32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}
_SELECTING = {"index_select", "gather", "embedding", "index", "slice_backward"}  # read only what they return
_OVERWRITING = {"copy_", "zero_", "fill_", "augment_layer"}
_ONLY_GRADIENT = {"avg_pool2d_backward"}  # reads none of the activations that it is given for their shapes
# Operators with a sum over the batch, which comes before everything else: by name, how many inputs both read.
_TWO_PASSES = {"native_batch_norm": 1, "native_batch_norm_backward": 2}
_ADDING = {"index_add", "index_add_", "scatter_add", "scatter_add_", "index_put_"}
# Operators that are several kernels in PyTorch's CUDA library.
_KERNELS = {
    "convolution_backward": 2,
    "native_layer_norm_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_fused_adamw_": 1,
    "index_add": 2,  # a copy, then additions
    "outlook_fused": 2,
    "outlook_fused_backward": 2,
}
_PER_IMAGE = {"im2col", "col2im"}  # in PyTorch's library, one kernel for each image of the batch
_ATTENTION = {"_scaled_dot_product_flash_attention": 2, "_scaled_dot_product_flash_attention_backward": 5}
_TILE, _WIDTH = 128, 32  # of attention: tokens, and of a head
# Outlook attention: the place of the logits among the arguments, products of weights and values, and
# instructions of a warp for each window and head in the programs that Triton 3.9 compiles for sm_90.
_OUTLOOK = {"outlook_fused": (1, 1, 316), "outlook_fused_backward": (2, 2, 664)}
_NAMESPACE = "horovod_volo"  # of the operators in kernels/


class GpuRates(NamedTuple):
    """Rates of a GPU."""

    tflops: float  # of bf16 products
    of_attention: float  # likewise
    terabytes: float  # per second, of memory
    instructions: float  # of warps, 10^12 per second
    gap: float = 0.0  # between two kernels, microseconds


class Operator(NamedTuple):
    """One operator of a step."""

    name: str
    backward: bool
    flops: int
    inputs: dict[int, int]  # bytes read, by tensor
    outputs: dict[int, int]  # bytes written, by tensor
    kernels: int
    custom: bool = False  # an operator of this package, which no compiler changes
    instructions: int = 0  # of warps, where they are known

    @property
    def bytes(self) -> int:
        """Return the bytes read and written."""
        return sum(self.inputs.values()) + sum(self.outputs.values())

    @property
    def kind(self) -> str:
        """Return the kind of work that it is."""
        if self.name in _ATTENTION:
            return "attention"
        if self.name.startswith("outlook"):
            return "outlook attention"
        if self.name.startswith("convolution"):
            return "convolutions"
        return "matrix products" if self.flops else "passes over memory"

    @property
    def fusible(self) -> bool:
        """Return whether a compiler may fuse it with its neighbours."""
        return not self.flops and not self.custom and self.name != "col2im"

    def seconds(self, gpu: GpuRates) -> float:
        """Return the time that a GPU of these rates takes."""
        products = gpu.of_attention if self.name in _ATTENTION else gpu.tflops
        return 1e-6 * gpu.gap * self.kernels + 1e-12 * max(
            self.bytes / gpu.terabytes, self.flops / products, self.instructions / gpu.instructions
        )


@dataclass
class StepCost:
    """The operators of a step, and the bytes that its forward keeps for backward."""

    operators: list[Operator] = field(default_factory=list)
    saved_bytes: int = 0

    def seconds(self, gpu: GpuRates) -> float:
        """Return the step's time on a GPU of these rates."""
        return sum(operator.seconds(gpu) for operator in self.operators)

    @property
    def kernels(self) -> int:
        """Return how many kernels the step launches."""
        return sum(operator.kernels for operator in self.operators)


class CostMode(TorchDispatchMode):
    """Counts the operators that run on the meta device while it is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = StepCost()
        # Storages, as a freed one's address could be used again. Not tensors: autograd clones a gradient that
        # others hold, instead of taking it.
        self._alive: list[torch.UntypedStorage] = []
        self._kept = {_storage(parameter) for parameter in model.parameters()}

    @contextmanager
    def counting(self) -> Iterator[StepCost]:
        """Count inside this context."""
        with torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor), self:
            yield self.cost

    def _saved(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._kept:
            self._kept.add(storage)
            self._alive.append(tensor.untyped_storage())
            self.cost.saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        result = in_cuda_memory_format(name, args, func(*args, **kwargs))
        inputs, outputs = _tensors([args, kwargs]), _tensors(result)
        given = {_storage(tensor) for tensor in inputs}
        mutates = func._schema.is_mutable
        if name in _FREE or (not mutates and all(_storage(tensor) in given for tensor in outputs)):
            return result  # an allocation or a view
        self._alive += [tensor.untyped_storage() for tensor in outputs]
        outputs += _tensors(list(_mutated(func, args, kwargs)))
        formula = flop_registry.get(func._overloadpacket)
        flops, instructions = int(formula(*args, **kwargs, out_val=result)) if formula else 0, 0
        if name in _ATTENTION:
            flops = _ATTENTION[name] * _flops_in_tiles(*args[0].shape)
        elif name in _OUTLOOK:
            place, products, of_window = _OUTLOOK[name]
            values, logits, heads = args[place - 1], args[place], args[-2]
            flops = 2 * products * logits.numel() * (values.shape[-1] // heads)
            instructions = of_window * logits.numel() // 81
        kernels = len(args[0]) if name in _PER_IMAGE else _KERNELS.get(name, 1)
        backward = torch._C._current_autograd_node() is not None
        custom = func.namespace == _NAMESPACE
        if name in _TWO_PASSES:
            first = _sizes(inputs[: _TWO_PASSES[name]])
            self.cost.operators.append(Operator(f"{name}_sums", backward, 0, first, {}, 1, custom))
        read = _read(name, inputs, outputs)
        self.cost.operators.append(
            Operator(name, backward, flops, read, _sizes(outputs), kernels, custom, instructions)
        )
        return result


def fused(operators: Sequence[Operator]) -> list[Operator]:
    """Return the operators as a compiler would fuse them at best.

    Neighbours without matrix products become one kernel, and what only this kernel needs is neither written
    nor read. Unfold is then reading at other places, and fold is one kernel.
    """
    last_use: dict[int, int] = {}
    for number, operator in enumerate(operators):
        last_use.update(dict.fromkeys(operator.inputs, number))
    result: list[Operator] = []
    group: list[Operator] = []
    start = 0
    for number, operator in enumerate(operators):
        joins = not group or operator.backward == group[-1].backward
        # A sum over the batch comes first, so that no operator before it can be fused.
        if operator.fusible and joins and operator.name not in _TWO_PASSES:
            group.append(operator)
            continue
        result += _merged(group, range(start, number), last_use)
        start = number
        group = [operator] if operator.fusible else []
        if not operator.fusible:
            result.append(operator)
            start = number + 1
    return result + _merged(group, range(start, len(operators)), last_use)


def _merged(group: list[Operator], numbers: range, last_use: dict[int, int]) -> list[Operator]:
    """Return one operator for a group of neighbours."""
    if not group:
        return []
    inputs: dict[int, int] = {}
    written: dict[int, int] = {}
    for operator in group:
        inputs |= {key: size for key, size in operator.inputs.items() if key not in written}
        written |= operator.outputs
    outputs = {key: size for key, size in written.items() if last_use.get(key, math.inf) >= numbers.stop}
    return [Operator("fused", group[0].backward, 0, inputs, outputs, 1)]


def _flops_in_tiles(batch: int, heads: int, tokens: int, width: int) -> int:
    """Return the operations of a product of queries and keys, in tiles."""
    padded = -(-tokens // _TILE) * _TILE
    return 2 * batch * heads * padded**2 * (-(-width // _WIDTH) * _WIDTH)


def _read(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> dict[int, int]:
    """Return the bytes that an operator reads of each tensor."""
    if name in _SELECTING:
        most = sum(map(_bytes, outputs))
        return {_storage(tensor): min(_bytes(tensor), most) for tensor in inputs}
    if name in _ADDING:  # besides a copy, for which all is read and written, rows are added to rows
        sizes, rows = _sizes(inputs), max(map(_bytes, inputs[1:]))
        copied = 0 if name.endswith("_") else 2 * _bytes(inputs[0])
        return sizes | {_storage(inputs[0]): copied + rows}
    if name in _ONLY_GRADIENT:
        return _sizes(inputs[:1])
    return _sizes(inputs[1:] if name in _OVERWRITING else inputs)


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator writes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of tensors by storage; several may be different views of one."""
    views = {(_storage(tensor), tensor.storage_offset()): _bytes(tensor) for tensor in tensors}
    sizes: dict[int, int] = {}
    for (storage, _), size in views.items():
        sizes[storage] = sizes.get(storage, 0) + size
    return sizes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements in memory; an expanded one repeats them."""
    lengths = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(lengths) * tensor.itemsize if tensor.numel() else 0


def in_cuda_memory_format(name: str, args: tuple[Any, ...], result: Any) -> Any:
    """Return an operator's result in the memory format that it has on CUDA, where meta has another."""
    channels_last = torch.channels_last
    if name == "convolution" and _is_channels_last(args[0]):
        return torch.empty_like(result, memory_format=channels_last)
    if name == "convolution_backward" and _is_channels_last(args[1]) and result[0] is not None:
        return (torch.empty_like(result[0], memory_format=channels_last), *result[1:])
    return result


def _is_channels_last(images: Tensor) -> bool:
    return not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
