"""A factor on the gradient of a loss, where it enters the backward pass."""

from __future__ import annotations

from typing import Any

import torch


def scale_gradient(loss: torch.Tensor, factor: float) -> list[Any]:
    """Have the backward pass of a loss begin with its gradient times a factor.

    The hook is on the loss tensor, so it works with every strategy that calls backward on it, and what the module
    returns and logs stays as it is. Under a factor of 0 a loss of 0/0 has no gradient, too, and those that come from
    other processes on the way, by attention to rows of this one, stay what they are.

    Args:
        loss: a scalar that requires a gradient.
        factor: at least 0.

    Returns:
        Handles of the hooks, to `remove()` after the backward pass.
    """
    hooks = [loss.register_hook(lambda gradient: gradient * factor)]  # type: ignore[no-untyped-call]
    return hooks if factor else hooks + _keep_finite(loss)


def _keep_finite(loss: torch.Tensor) -> list[Any]:
    """Have the backward pass of a loss carry 0 for what is not finite; handles of the hooks that do.

    The mean over no label at all is 0/0, and 0 times its gradient is not 0. The hooks are on the nodes of the graph and
    not on parameters: those of a sharded strategy are others in the backward pass than the module shows now; and a
    gradient may cross to other processes on its way, where it must not be NaN either.
    """
    waiting, seen, hooks = [loss.grad_fn], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not node.next_functions:  # what accumulates into a leaf has none
            continue
        seen.add(node)
        hooks.append(node.register_hook(lambda inputs, _: tuple(map(_finite, inputs))))
        waiting.extend(following for following, _ in node.next_functions)
    return hooks


def _finite(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
