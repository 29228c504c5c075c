"""The attention that is active: what a module calls, whoever trains it.

A module that calls `core_attention` trains alone, under plain data parallelism and under context parallelism, unedited:
the strategy that trains it says what attends. Source: Libra (arXiv:2607.23250), section 4.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.pool_plan import layout_plan
from odb_libra_lightning.libra.prepared_plan import PreparedPlan, prepare_plan


class Attends(Protocol):
    """What attends for the rows that this process holds of a packed sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        """Causal attention within documents, over the whole packed sequence.

        Args:
            q: queries of this process's rows, `[T, num_heads, head_dim]`.
            k: keys, `[T, num_kv_heads, head_dim]`.
            v: values, like `k`.
            window: keys that a query sees at the most, its own included; None: all before it.
            scale: factor of the scores; None: `head_dim ** -0.5`.
        """


# Of the process and not of a thread: recomputation under a checkpoint runs in threads of autograd.
_active: list[Attends] = []


def activate(attends: Attends) -> None:
    """Have `core_attention` attend by this, until `deactivate`; the last one activated counts."""
    _active.append(attends)


def deactivate(attends: Attends) -> None:
    """Take back an `activate`; does nothing where there is none."""
    if attends in _active:
        _active.remove(attends)


def active() -> Attends | None:
    """What `core_attention` attends by; None: this process, on the rows it is given."""
    return _active[-1] if _active else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position_ids: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within the documents of a packed sequence, exact under whatever strategy trains.

    Under a strategy of `odb_libra_lightning.strategies` the documents are those of the micro-batch, and the rows are
    this process's share of them. Without one, they are read off `position_ids`.

    Example:
        >>> rows = torch.randn(1, 6, 2, 8)
        >>> out = core_attention(rows, rows, rows, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1]]))
        >>> torch.allclose(out[:, 4], rows[:, 4])  # the first row of a document sees itself alone
        True

    Args:
        q: queries, `[batch, T, num_heads, head_dim]` or `[T, num_heads, head_dim]`.
        k: keys, `[..., T, num_kv_heads, head_dim]`.
        v: values, like `k`.
        position_ids: positions within documents, `[batch, T]` or `[T]`: a 0 begins a document. Not read under a
            strategy that knows the documents. None: every row of the batch is one document.
        window: keys that a query sees at the most, its own included; None: all before it.
        scale: factor of the scores; None: `head_dim ** -0.5`.

    Returns:
        The output, like `q`.

    Raises:
        ValueError: shapes that do not fit, or a batch of several packed sequences under context parallelism.
    """
    if q.ndim not in (3, 4) or k.ndim != q.ndim or v.ndim != q.ndim:
        raise ValueError(
            f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions: expected [batch, T, heads, head_dim] or "
            "[T, heads, head_dim]"
        )
    attends = active()
    if attends is not None and q.ndim == 4 and len(q) != 1:
        raise ValueError(
            f"a batch of {len(q)} sequences under context parallelism: it takes one packed sequence, [1, T]; collate "
            "samples into one with PackingCollator"
        )
    shape, batch = q.shape, 1 if q.ndim == 3 else len(q)
    q, k, v = (each.flatten(0, 1) if each.ndim == 4 else each for each in (q, k, v))
    if attends is None:
        out = _attend_here(q, k, v, _document_lengths(len(q), batch, position_ids), window=window, scale=scale)
    else:
        out = attends.attend(q, k, v, window=window, scale=scale)
    return out.view(shape)


# What was read last off positions, for the other layers of the batch: reading waits for the device.
_read_last: list[tuple[weakref.ref[Tensor], tuple[int, ...], tuple[int, ...]]] = []


def _document_lengths(rows: int, batch: int, position_ids: Tensor | None) -> tuple[int, ...]:
    if not rows:
        return ()
    if position_ids is None:
        return (rows // batch,) * batch
    version = -1 if position_ids.is_inference() else position_ids._version
    asked = (version, rows, batch)
    for tensor, known, lengths in _read_last:
        if tensor() is position_ids and known == asked and version >= 0:
            return lengths
    if position_ids.numel() * batch not in (rows * batch, rows):  # one row of positions may serve all
        raise ValueError(f"position_ids {list(position_ids.shape)} for {batch} sequences of {rows // batch} tokens")
    begins = (position_ids.reshape(-1, rows // batch) == 0).expand(batch, -1).clone()
    begins[:, 0] = True
    starts = begins.reshape(-1).nonzero().flatten().tolist()
    lengths = tuple(stop - start for start, stop in zip(starts, [*starts[1:], rows], strict=True))
    _read_last[:] = [(weakref.ref(position_ids), asked, lengths)]
    return lengths


def _attend_here(
    q: Tensor, k: Tensor, v: Tensor, documents: tuple[int, ...], *, window: int | None, scale: float | None
) -> Tensor:
    if not documents:
        return q * 0.0
    plan = _own_plan(documents, q.shape[1], k.shape[1], q.shape[2], q.element_size(), window)
    return libra_attention(q, k, v, plan, scale=scale)


@lru_cache(maxsize=16)  # all layers of a batch ask for the same
def _own_plan(
    documents: tuple[int, ...], heads: int, kv_heads: int, head_dim: int, element_bytes: int, window: int | None
) -> PreparedPlan:
    layout = PoolLayout(
        context_parallel=1,
        block_size=sum(documents),
        head_shards=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        bytes_per_element=element_bytes,
        chunks=1,
        window=window,
    )
    return prepare_plan(layout_plan([documents], layout), 0)
