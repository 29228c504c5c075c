"""Exact varlen attention on a CPU, on the operator behind `scaled_dot_product_attention`.

PyTorch has no varlen attention for CPUs, but the operator of its CPU flash attention gives the log-sum-exp and has a
backward that takes it. It knows full attention, square causal attention and an additive mask, so every segment is cut
into pieces of these three kinds (`cut`); what is left is to call the operator as seldom as possible (`share_calls`)
and to put the results together (`CpuKernel`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from odb_libra_lightning.libra.kernel_interface import check_inputs, merge_parts
from odb_libra_lightning.libra.segments import Segments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# A call costs about as much time as this many query-key pairs of 8 heads of 64: so much padding may save one.
_PAIRS_OF_A_CALL = 256
# Beyond about a megabyte, what a shared call allocates costs more than the calls it saves.
_ROWS_OF_A_CALL = 512
# Rows of a band that are computed together. More see more masked keys, fewer need more calls.
_ROWS_OF_A_BAND = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A rectangle of queries and keys of one segment; rows of `q` and of `k`.

    Attributes:
        kind: which of its keys a query sees. "full": all. "causal": as many keys as queries, query `i` sees keys up to
            `i`. "band": query `i` sees keys `i` to `i + window - 1`.
        first: no piece before this one has the same queries.
        whole: this piece is its whole segment.
    """

    kind: str
    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    first: bool = True
    whole: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.query_stop - self.query_start, self.key_stop - self.key_start


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Pieces computed by one call: one, or several whole segments of about one length.

    In a shared call shorter segments repeat their own last row to the longest one's length: as such keys come after
    every real query, causal attention does not see them, and rows of other documents never come near.

    Attributes:
        piece: the only piece, or the longest of those that share the call.
        count: number of pieces.
        queries: row of `q` at each place of the call, [count * longest]; None for a single piece.
        keys: row of `k` at each place.
        real: places that are no padding; None where all are real. Kinds with padding have as many queries as keys.
        padding: the other places.
    """

    piece: Piece
    count: int = 1
    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    real: torch.Tensor | None = None
    padding: torch.Tensor | None = None


def cut(segments: Segments, *, causal: bool, window: int | None) -> Iterator[Piece]:
    """Cut every segment into pieces that the operator can compute.

    A causal segment with earlier keys is a full rectangle over these and a causal square over its own. Where a sliding
    window is shorter than the keys, queries that reach back past it are computed a few rows at a time, each few against
    the keys that any of them sees.

    Args:
        segments: runs of queries and their keys.
        causal: aligned to the bottom right.
        window: keys a query sees at most, its own included; None: all.

    Yields:
        Pieces in order of the segments; together they hold each visible pair once. O(segments + rows / rows of a band).

    Raises:
        ValueError: causal attention has more queries than keys.
    """
    starts = zip(segments.query_starts, segments.key_starts, strict=True)
    lengths = zip(segments.query_lengths, segments.key_lengths, strict=True)
    for number, ((query, key), (queries, keys)) in enumerate(zip(starts, lengths, strict=False)):
        if causal and queries > keys:
            raise ValueError(
                f"segment {number} has {queries} queries and {keys} keys; under causal attention it needs no more "
                "queries than keys"
            )
        whole = Piece(
            kind="full", query_start=query, query_stop=query + queries, key_start=key, key_stop=key + keys, whole=True
        )
        if not causal:
            yield whole
        elif window is None or window >= keys:
            yield from _cut_causal(whole)
        else:
            yield from _cut_window(whole, window)


def _cut_causal(segment: Piece) -> Iterator[Piece]:
    queries, keys = segment.shape
    if queries == 1:  # sees everything
        yield segment
    elif queries == keys:
        yield replace(segment, kind="causal")
    else:
        diagonal = segment.key_stop - queries
        yield replace(segment, kind="causal", key_start=diagonal, whole=False)
        yield replace(segment, key_stop=diagonal, whole=False, first=False)


def _cut_window(segment: Piece, window: int) -> Iterator[Piece]:
    queries, keys = segment.shape
    offset = segment.key_start + keys - queries - segment.query_start  # from a query's row to its own key's
    # Queries up to here see every key before them.
    start = min(max(segment.query_start, segment.key_start + window - offset), segment.query_stop)
    if start > segment.query_start:
        yield from _cut_causal(replace(segment, query_stop=start, key_stop=start + offset, whole=False))
    for row in range(start, segment.query_stop, _ROWS_OF_A_BAND):
        stop = min(row + _ROWS_OF_A_BAND, segment.query_stop)
        yield replace(
            segment,
            kind="band",
            query_start=row,
            query_stop=stop,
            key_start=row + offset - window + 1,
            key_stop=stop + offset,
            whole=False,
        )


def share_calls(pieces: Sequence[Piece]) -> Iterator[Call]:
    """Put whole segments of about one length into one call; every other piece has its own.

    Long segments gain nothing from company, so a call takes a shorter segment only while its padding costs less than
    another call. Calls depend on lengths alone, never on what stands in the rows.

    Args:
        pieces: pieces of `cut`.

    Yields:
        Calls; those that meet queries for the first time stand before the others. O(n log n).
    """
    shared: list[list[Piece]] = []
    whole = [piece for piece in pieces if piece.whole]
    for piece in sorted(whole, key=lambda each: (each.kind, each.shape), reverse=True):
        if shared and _fits(piece, shared[-1]):
            shared[-1].append(piece)
        else:
            shared.append([piece])
    yield from (_call(group) for group in shared)
    yield from (Call(piece=piece) for piece in pieces if not piece.whole and piece.first)
    yield from (Call(piece=piece) for piece in pieces if not piece.first)


def _fits(piece: Piece, group: list[Piece]) -> bool:
    longest = group[0]
    if piece.kind != longest.kind or (len(group) + 1) * max(longest.shape) > _ROWS_OF_A_CALL:
        return False
    if piece.kind == "full":
        return piece.shape == longest.shape
    return longest.shape[0] ** 2 - piece.shape[0] ** 2 <= 2 * _PAIRS_OF_A_CALL


def _call(group: list[Piece]) -> Call:
    longest = group[0]
    if len(group) == 1:
        return Call(piece=longest)
    places = torch.arange(longest.shape[0])
    lengths = torch.tensor([piece.shape[0] for piece in group])[:, None]
    query_starts = torch.tensor([piece.query_start for piece in group])[:, None]
    key_starts = torch.tensor([piece.key_start for piece in group])[:, None]
    queries = query_starts + places.minimum(lengths - 1)
    keys = key_starts + (places.minimum(lengths - 1) if longest.kind == "causal" else torch.arange(longest.shape[1]))
    is_real = (places < lengths).flatten()
    padded = not bool(is_real.all())
    return Call(
        piece=longest,
        count=len(group),
        queries=queries.flatten(),
        keys=keys.flatten(),
        real=is_real.nonzero().flatten() if padded else None,
        padding=(~is_real).nonzero().flatten() if padded else None,
    )


class CpuKernel:
    """`AttentionKernel` for CPUs, float64, float32 and half precision.

    Half precision is computed in float32 and rounded once. Results of one document are the same to the last bit
    whatever stands in the others.

    Args:
        grouped_heads: whether the operator takes fewer KV heads than query heads. It does in PyTorch 2.10, whereas
            that of 2.6 reads past the end of the keys. None: by the version of PyTorch.
    """

    def __init__(self, *, grouped_heads: bool | None = None) -> None:
        version = tuple(int(number) for number in torch.__version__.split(".")[:2])
        self._grouped_heads = version >= (2, 10) if grouped_heads is None else grouped_heads
        # The layers of a model and their chunks of heads share their segments.
        self._calls = lru_cache(maxsize=32)(_calls)
        self._mask = lru_cache(maxsize=4)(_band_mask)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionKernel.forward`."""
        _check(q, k, v, segments, causal=causal, window=window)
        dtype = _computed_in(q.dtype)
        rows_q, rows_k, rows_v = _rows(q, dtype), *self._per_query_head(q, _rows(k, dtype), _rows(v, dtype))
        out = torch.empty(q.shape, dtype=dtype)
        lse = torch.empty(q.shape[:2], dtype=dtype)
        for call in self._calls(segments, causal, window):
            part, part_lse = _forward(
                _take(rows_q, call, "queries"),
                _take(rows_k, call, "keys"),
                _take(rows_v, call, "keys"),
                0.0,
                call.piece.kind == "causal",
                attn_mask=self._mask_of(call, dtype),
                scale=scale,
            )
            if call.piece.first:
                _put(out, part, call, "queries")
                _put(lse, part_lse, call, "queries")
            else:
                rows = slice(*_range(call.piece, "queries"))
                merge_parts(out[rows], lse[rows].t(), part[0].transpose(0, 1), part_lse[0])
        return out.to(q.dtype), lse.t().contiguous()

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `AttentionKernel.backward`."""
        _check(q, k, v, segments, causal=causal, window=window)
        dtype = _computed_in(q.dtype)
        rows_q, rows_k, rows_v = _rows(q, dtype), *self._per_query_head(q, _rows(k, dtype), _rows(v, dtype))
        rows_grad, rows_out, rows_lse = _rows(grad_out, dtype), _rows(out, dtype), lse.to(dtype).t().contiguous()
        dq = torch.empty(q.shape, dtype=dtype)
        # A sliding window may leave keys that no query sees.
        dk, dv = torch.zeros(k.shape, dtype=dtype), torch.zeros(v.shape, dtype=dtype)
        for call in self._calls(segments, causal, window):
            taken_grad = _take(rows_grad, call, "queries", clear_padding=True)
            part_q, part_k, part_v = _backward(
                taken_grad,
                _take(rows_q, call, "queries"),
                _take(rows_k, call, "keys"),
                _take(rows_v, call, "keys"),
                _take(rows_out, call, "queries"),
                _take(rows_lse, call, "queries"),
                0.0,
                call.piece.kind == "causal",
                attn_mask=self._mask_of(call, dtype),
                scale=scale,
            )
            _put(dq, part_q, call, "queries", add=not call.piece.first)
            for grad, part in ((dk, part_k), (dv, part_v)):
                _put(grad, _per_kv_head(part, k.shape[1]), call, "keys", add=not call.piece.whole)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _per_query_head(self, q: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = q.shape[1] // rows[0].shape[1]
        if self._grouped_heads or group == 1:
            return rows
        return tuple(each.repeat_interleave(group, dim=1) for each in rows)

    def _mask_of(self, call: Call, dtype: torch.dtype) -> torch.Tensor | None:
        if call.piece.kind != "band":
            return None
        queries, keys = call.piece.shape
        mask: torch.Tensor = self._mask(keys - queries + 1, dtype)
        return mask[:queries, :keys]


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, *, causal: bool, window: int | None
) -> None:
    check_inputs(q, k, v, segments, causal=causal, window=window)
    if q.device.type != "cpu":
        raise ValueError(f"the kernel 'cpu' takes tensors on a CPU, not on {q.device}")


def _calls(segments: Segments, causal: bool, window: int | None) -> tuple[Call, ...]:
    return tuple(share_calls(tuple(cut(segments, causal=causal, window=window))))


def _band_mask(window: int, dtype: torch.dtype) -> torch.Tensor:
    """What to add to the scores of a band: 0 where key `j` is in `[i, i + window)`, else minus infinity."""
    keys = torch.arange(_ROWS_OF_A_BAND + window - 1) - torch.arange(_ROWS_OF_A_BAND)[:, None]
    visible = (keys >= 0) & (keys < window)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the dtype that is computed in; the operator wants a head's numbers side by side."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _take(rows: torch.Tensor, call: Call, side: str, *, clear_padding: bool = False) -> torch.Tensor:
    """Rows of a call, [T, heads, ...] to [count, heads, length, ...] as the operator wants them."""
    piece = call.piece
    index = call.queries if side == "queries" else call.keys
    if index is None:
        start, stop = _range(piece, side)
        taken = rows[start:stop].unsqueeze(0)
    else:
        taken = rows.index_select(0, index)
        if clear_padding and call.padding is not None:
            taken.index_fill_(0, call.padding, 0)
        taken = taken.view(call.count, -1, *rows.shape[1:])
    return taken.transpose(1, 2)


def _put(rows: torch.Tensor, part: torch.Tensor, call: Call, side: str, *, add: bool = False) -> None:
    """Write or add a call's result, [count, heads, length, ...], to its rows."""
    index = call.queries if side == "queries" else call.keys
    result = part.transpose(1, 2).flatten(0, 1)
    if index is None:
        start, stop = _range(call.piece, side)
        target = rows[start:stop]
        target.add_(result) if add else target.copy_(result)
        return
    if call.real is not None:
        index, result = index[call.real], result.index_select(0, call.real)
    rows.index_copy_(0, index, result)


def _range(piece: Piece, side: str) -> tuple[int, int]:
    return (piece.query_start, piece.query_stop) if side == "queries" else (piece.key_start, piece.key_stop)


def _per_kv_head(grad: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Sum the gradient of repeated heads over each group, [count, query heads, length, D] to KV heads."""
    if grad.shape[1] == kv_heads:
        return grad
    count, _, length, width = grad.shape
    return grad.view(count, kv_heads, -1, length, width).sum(2)
