"""A factor on the gradient of a loss, where it enters the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction


def scale_gradient(loss: torch.Tensor, factor: float) -> list[Any]:
    """Have the backward pass of a loss begin with its gradient times a factor.

    The hook is on the loss tensor, so it works with every strategy that calls backward on it, and what the module
    returns and logs stays as it is. Under a factor of 0 the loss has no gradient, even if it is 0/0.

    Args:
        loss: a scalar that requires a gradient.
        factor: at least 0.

    Returns:
        Handles of the hooks, to `remove()` after the backward pass.
    """
    hooks = [loss.register_hook(lambda gradient: gradient * factor)]  # type: ignore[no-untyped-call]
    return hooks if factor else hooks + _zero_gradients(loss)


def _zero_gradients(loss: torch.Tensor) -> list[Any]:
    """Have the backward pass of a loss carry zeros, whatever it computes; handles of the hooks that do.

    The mean over no label at all is 0/0, and 0 times its gradient is not 0. The hooks are on the nodes of the graph and
    not on parameters: those of a sharded strategy are others in the backward pass than the module shows now; and a
    gradient may cross to other processes on its way, where it must not be NaN either.

    What an exchange passes on is left alone: under context parallelism rows without a label are keys of other
    processes' rows, whose gradient comes back by attention. What arrives from above is 0 there already.
    """
    reached = _nodes_below([loss.grad_fn])
    exchanged = _nodes_below(node for node in reached if _exchanges(node))
    return [
        node.register_hook(lambda inputs, _: tuple(g if g is None else torch.zeros_like(g) for g in inputs))
        for node in reached - exchanged
        if node.next_functions  # what accumulates into a leaf has none
    ]


def _exchanges(node: Node) -> bool:
    """Whether a node takes gradients from other processes, or may: what a checkpoint recomputes is not seen."""
    is_checkpoint = isinstance(node, CheckpointFunction._backward_cls) or "Checkpoint" in type(node).__name__
    return is_checkpoint or getattr(node, "exchanges_gradients", False)


def _nodes_below(nodes: Iterable[Node | None]) -> set[Node]:
    """These nodes of a graph and all that the backward pass comes to from them."""
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return seen
