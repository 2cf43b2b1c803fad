"""Pre-norm residual branches on NVIDIA GPUs: LayerNorm of the images that keep a branch, and its addition.

One kernel adds a branch to the residual stream and normalizes the sum for the next branch, in the dtype of
that branch's first product. Its backward adds the gradient of the skip connection, and writes the gradient of
the branch that was added and of the bias of its last product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from horovod_volo.kernels.residual_ops import (
    add,
    add_backward,
    add_normalize,
    add_normalize_backward,
    normalize,
    normalize_backward,
)


class ResidualStream(NamedTuple):
    """Tokens (batch, ..., channels) and a residual branch of them that has not been added yet.

    `rows` are numbers of images, -1 for one that is computed but dropped; `position` is the inverse; None:
    all images. `bias` is that of the branch's last product, whose gradient is computed here: the branch must
    have added it without a gradient.
    """

    tokens: Tensor
    branch: Tensor | None = None
    bias: Tensor | None = None
    rows: Tensor | None = None
    position: Tensor | None = None
    scale: float = 1.0

    def normalized(
        self, norm: Any, rows: Tensor | None, position: Tensor | None
    ) -> tuple[ResidualStream, Tensor]:
        """Return the stream with its branch added, and its LayerNorm for the images in `rows`.

        Under autocast the latter has autocast's dtype.
        """
        on = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if on else self.tokens.dtype
        parameters = norm.weight, norm.bias
        if self.branch is None:
            tokens, normed = _Normalize.apply(  # type: ignore[no-untyped-call]
                self.tokens.contiguous(), *parameters, rows, position, norm.eps, dtype
            )
        else:
            images = len(self.tokens if rows is None else rows)
            pending = self.branch.contiguous(), self.bias, self.rows, self.position, self.scale
            tokens, normed = _AddNormalize.apply(  # type: ignore[no-untyped-call]
                self.tokens, *pending, *parameters, position, images, norm.eps, dtype
            )
        return ResidualStream(tokens), normed

    def added(self) -> Tensor:
        """Return the tokens with the branch added, for the images that keep it."""
        if self.branch is None:
            return self.tokens
        pending = self.branch.contiguous(), self.bias, self.rows, self.position, self.scale
        result: Tensor = _Add.apply(self.tokens, *pending)  # type: ignore[no-untyped-call]
        return result


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        bias: Tensor,
        rows: Tensor | None,
        position: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        normed, mean, rstd = normalize(tokens, weight, bias, rows, eps, dtype)
        ctx.save_for_backward(tokens, mean, rstd, position, weight)
        ctx.set_materialize_grads(False)  # the stream may end here
        return tokens, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_skip: Tensor | None, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        grad_tokens, parts = normalize_backward(grad_skip, grad_normed, *ctx.saved_tensors)
        return grad_tokens, *parts.sum(0), None, None, None, None


class _AddNormalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        branch: Tensor,
        branch_bias: Tensor | None,
        rows: Tensor | None,  # noqa: ARG004
        position: Tensor | None,
        scale: float,
        weight: Tensor,
        bias: Tensor,
        next_position: Tensor | None,
        images: int,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        result: Tensor
        result, normed, mean, rstd = add_normalize(
            tokens, branch, position, scale, weight, bias, next_position, images, eps, dtype
        )
        ctx.save_for_backward(result, mean, rstd, next_position, weight, position)
        ctx.branch = len(branch), scale, branch.dtype
        ctx.biased = branch_bias is not None
        return result, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_skip: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        grad_tokens, grad_branch, parts = add_normalize_backward(
            grad_skip, grad_normed, *ctx.saved_tensors, *ctx.branch
        )
        of_weight, of_bias, of_branch_bias = parts.sum(0)
        none = (None,) * 4
        of_branch_bias = of_branch_bias if ctx.biased else None
        return grad_tokens, grad_branch, of_branch_bias, *none[:3], of_weight, of_bias, *none


class _Add(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        branch: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        position: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.branch = len(branch), scale, branch.dtype
        ctx.biased = bias is not None
        result: Tensor = add(tokens, branch, position, scale)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        grad_branch = add_backward(gradient, rows, *ctx.branch)
        of_bias = grad_branch.flatten(0, -2).sum(0, dtype=torch.float32) if ctx.biased else None
        return gradient, grad_branch, of_bias, None, None, None
