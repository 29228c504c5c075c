"""A factor on the gradient of a loss, where it enters the backward pass."""

from __future__ import annotations

from typing import Any

import torch


def scale_gradient(loss: torch.Tensor, factor: float) -> list[Any]:
    """Have the backward pass of a loss begin with its gradient times a factor.

    The hook is on the loss tensor, so it works with every strategy that calls backward on it, and what the module
    returns and logs stays as it is. A factor of 0 makes every gradient 0, whatever the backward pass computes.

    Args:
        loss: a scalar that requires a gradient.
        factor: at least 0.

    Returns:
        Handles of the hooks, to `remove()` after the backward pass.
    """
    hooks = [loss.register_hook(lambda gradient: gradient * factor)]  # type: ignore[no-untyped-call]
    return hooks if factor else hooks + zero_gradients(loss)


def zero_gradients(loss: torch.Tensor) -> list[Any]:
    """Have the backward pass of a loss carry zeros, whatever it computes; handles of the hooks that do.

    The mean over no label at all is 0/0, and 0 times its gradient is not 0. The hooks are on the nodes of the graph and
    not on parameters: those of a sharded strategy are others in the backward pass than the module shows now; and a
    gradient may cross to other ranks on its way (synchronized normalization, context parallelism), where it must not be
    NaN either.
    """
    waiting, seen, hooks = [loss.grad_fn], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not node.next_functions:  # what accumulates into a leaf has none
            continue
        seen.add(node)
        hooks.append(
            node.register_hook(lambda inputs, _: tuple(g if g is None else torch.zeros_like(g) for g in inputs))
        )
        waiting.extend(following for following, _ in node.next_functions)
    return hooks
