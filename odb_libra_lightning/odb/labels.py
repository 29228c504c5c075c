"""Counting the labels of a collated batch that bear loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def count_loss_tokens(batch: Any, *, causal_shift: bool = True, ignore_index: int = -100) -> int | None:
    """Number of labels that the loss of a batch is a mean over.

    `labels` is looked for in mappings, dataclasses, named tuples and sequences, at any depth; `shift_labels`
    (already shifted) goes before it.

    Args:
        batch: the collated batch.
        causal_shift: whether the loss drops the first label of each row of `labels` `[..., tokens]`. Labels
            of one dimension, one a sample, are never shifted.
        ignore_index: label that bears no loss.

    Returns:
        The count, or None where the batch has no labels.
    """
    shifted = _find(batch, "shift_labels")
    if shifted is not None:
        return int((shifted != ignore_index).sum())
    labels = _find(batch, "labels")
    if labels is None:
        return None
    if causal_shift and labels.dim() > 1:
        labels = labels[..., 1:]
    return int((labels != ignore_index).sum())


def _find(node: Any, name: str) -> torch.Tensor | None:
    """First tensor called `name` in a nested structure, nearest to the top first within each branch."""
    fields = _fields(node)
    value = fields.get(name)
    if isinstance(value, torch.Tensor):
        return value
    children = fields.values() if fields else node if isinstance(node, (list, tuple)) else ()
    for child in children:
        found = _find(child, name)
        if found is not None:
            return found
    return None


def _fields(node: Any) -> Mapping[Any, Any]:
    if isinstance(node, Mapping):
        return node
    if dataclasses.is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return dict(zip(node._fields, node, strict=True))
    return {name: getattr(node, name) for name in ("labels", "shift_labels") if hasattr(node, name)}
