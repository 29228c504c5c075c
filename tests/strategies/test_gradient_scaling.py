"""A factor on a loss: 0 silences a loss of 0/0, and nothing that comes from other processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from odb_libra_lightning.strategies.gradient_scaling import scale_gradient


class FromOthers(torch.autograd.Function):
    """Passes rows on, and in the backward pass adds 1, as if another process had attended to them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.exchanges_gradients = True
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert gradient.isfinite().all()
        return gradient + 1


def loss_of(rows: Tensor, *, labels: int) -> Tensor:
    """A mean over the first rows, 0/0 where there are none."""
    return rows[:labels].square().sum() / torch.tensor(float(labels))


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_a_factor_multiplies_every_gradient(factor: float) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = loss_of(weight, labels=2)
    hooks = scale_gradient(loss, factor)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [factor * 1.0, factor * 2.0, 0.0]
    assert loss.item() == 2.5
    for hook in hooks:
        hook.remove()
    weight.grad = None
    loss_of(weight, labels=2).backward()
    assert weight.grad.tolist() == [1.0, 2.0, 0.0]


class OtherCheckpointFunction(torch.autograd.Function):
    """A checkpoint of another library: what it recomputes cannot be seen from outside."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 1


@pytest.mark.parametrize("kind", ["bare", "reentrant", "not reentrant", "of another library"])
def test_factor_zero_keeps_what_others_send(kind: str) -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    residual = weight * 3  # goes round the exchange, as a residual stream does
    if kind == "of another library":
        exchanged = OtherCheckpointFunction.apply(residual)  # type: ignore[no-untyped-call]
    elif kind == "bare":
        exchanged = FromOthers.apply(residual)  # type: ignore[no-untyped-call]
    else:
        exchanged = checkpoint(FromOthers.apply, residual, use_reentrant=kind == "reentrant")
    assert isinstance(exchanged, Tensor)
    head = torch.tensor([1.0, 1.0], requires_grad=True)
    loss = loss_of((residual + exchanged) * head, labels=0)
    assert loss.isnan()
    scale_gradient(loss, 0.0)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]  # of the exchange alone
    assert head.grad is not None
    assert head.grad.tolist() == [0.0, 0.0]


def test_factor_zero_without_an_exchange_is_no_gradient() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = loss_of(weight * 3, labels=0)
    scale_gradient(loss, 0.0)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0]
