"""Exact attention of a pool by a plan: tiles travel to the workers that compute them, forward and backward.

Every worker calls `libra_attention` on the rows it is home to, in the same order. Heads go in `M` chunks: while one is
computed, the next is under way and the last returns, so that of all transfers only the first and the last are not
hidden. All workers take part in the same collectives in the same order, also those that compute nothing. Source: Libra
(arXiv:2607.23250), section 6; the kernel is any of `libra.kernels`, unmodified.

Shape suffixes: `T` rows at home, `Tq` and `Tk` rows that the kernel is called on, `S = H * M` slices of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from odb_libra_lightning.libra.kernels import AttentionKernel, kernel_for
from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.prepared_plan import PreparedPlan, prepare_plan
from odb_libra_lightning.libra.segments import Segments
from odb_libra_lightning.libra.transport import GroupTransport, Handle, LocalTransport, Transport

Remember = Literal["keep", "refetch"]


def libra_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PoolPlan | PreparedPlan,
    *,
    transport: Transport | None = None,
    kernel: str | AttentionKernel | None = None,
    scale: float | None = None,
    remember: Remember = "keep",
) -> Tensor:
    """Causal attention within documents, over the packed sequences of a pool. A collective of all its workers.

    Args:
        q: queries of the rows at home, `[T, num_heads, head_dim]`.
        k: keys, `[T, num_kv_heads, head_dim]`.
        v: values, like `k`.
        plan: the pool's plan, the same on every worker.
        transport: what carries rows between the workers; worker `w` of the plan is its rank `w`. None: all processes
            of `torch.distributed`, or this process alone where the plan has one worker.
        kernel: name of a kernel in `libra.kernels`, or a kernel; None: the best one of the device.
        scale: factor of the scores, above 0; None: `head_dim ** -0.5`.
        remember: what backward does for queries and keys of other workers. `keep` holds them from forward, as many
            bytes as this worker received; `refetch` asks for them again, the same transfers once more. The output and
            log-sum-exp of what was computed here are held either way.

    Returns:
        The output of the rows at home, like `q`; 0 in rows of no document.

    Raises:
        TypeError: a plan, transport or kernel that is none.
        ValueError: tensors that do not match the plan or each other, a transport of another size, an option that there
            is not. Nothing has been sent then.
        RuntimeError: a worker that does not answer.
    """
    workers = _workers(plan)
    if transport is None:
        transport = LocalTransport() if workers == 1 else GroupTransport()
    if not isinstance(getattr(transport, "rank", None), int):
        made = "expected a Transport, such as GroupTransport(process_group)"
        raise TypeError(f"transport is a {type(transport).__name__}: {made}")
    prepared = plan if isinstance(plan, PreparedPlan) else prepare_plan(plan, transport.rank)
    _check(q, k, v, prepared, transport)
    if remember not in get_args(Remember):
        raise ValueError(f"remember={remember!r}: choose one of {', '.join(get_args(Remember))}")
    # Kernels mask scores with minus infinity before they scale them, which below 0 makes it plus infinity.
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"scale={scale!r}: expected a finite number above 0, or None for head_dim ** -0.5")
    if kernel is not None and not isinstance(kernel, str) and not hasattr(kernel, "backward"):
        raise TypeError(f"kernel is a {type(kernel).__name__}: expected a name or an AttentionKernel")
    run = _Run(
        prepared=prepared,
        transport=transport,
        kernel=kernel_for(q.device, kernel) if kernel is None or isinstance(kernel, str) else kernel,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        remember=remember,
    )
    out: Tensor = _Attention.apply(q, k, v, run)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: _Run) -> Tensor:
        out, held = run.forward(q, k, v)
        ctx.run = run
        # On every worker as many tensors, empty ones too: recomputation under a checkpoint ends at the last of them.
        ctx.save_for_backward(q, k, v, *held)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *held = ctx.saved_tensors
        return *ctx.run.backward(grad_out, q, k, v, _Held(*held)), None


class _Held(NamedTuple):
    """What backward needs besides the tensors at home. With `refetch` the first two are empty.

    Where nothing of the pool travels they are too, and the others have all heads at once.

    Attributes:
        queries: received slabs, `[M, received, h_q / S * D]`.
        keys: received keys and values, `[received, 2 * D]`.
        out: the kernel's outputs, `[M, Tq, h_q / S, D]`.
        lse: log-sum-exp of the scores, `[M, h_q / S, Tq]`.
    """

    queries: Tensor
    keys: Tensor
    out: Tensor
    lse: Tensor


def _nothing_held(plan: PreparedPlan, q: Tensor) -> _Held:
    """Room for what forward will hold."""
    work, width, head_dim = plan.work, plan.slice_heads, q.shape[2]
    rows = sum(work.query_lengths)
    received = sum(work.received_splits) if plan.moves_queries else 0
    return _Held(
        queries=q.new_empty(plan.chunks, received, width * head_dim),
        keys=q.new_empty(work.received_keys, 2 * head_dim),
        out=q.new_empty(plan.chunks, rows, width, head_dim),
        lse=q.new_empty(plan.chunks, width, rows, dtype=torch.promote_types(q.dtype, torch.float32)),
    )


class _Transfer(NamedTuple):
    handle: Handle
    output: Tensor
    input: Tensor  # alive and untouched until the transfer is over

    def wait(self) -> Tensor:
        self.handle.wait()
        return self.output


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One attention call on one worker."""

    prepared: PreparedPlan
    transport: Transport
    kernel: AttentionKernel
    scale: float
    remember: Remember

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, _Held]:
        if (segments := self.prepared.documents_at_home) is not None:
            return self._forward_at_home(q, k, v, segments)
        plan, chunks = self.prepared, self.prepared.chunks
        index = plan.index(q.device)
        slabs, pairs = plan.slabs(q), plan.pairs(k, v)
        held = _nothing_held(plan, q)
        out = torch.zeros_like(slabs)
        keys = _KernelKeys(self.prepared, pairs, held.keys)
        returning = []
        arriving = self._dispatch(slabs, pairs, held, 0)
        for m in range(chunks):
            for transfer in arriving:
                transfer.wait()
            arriving = self._dispatch(slabs, pairs, held, m + 1) if m + 1 < chunks else []
            q_in = plan.kernel_queries(slabs, held.queries[m], m)
            out_in, lse = self.kernel.forward(q_in, *keys.of(m), plan.segments, **self._mask())
            held.out[m], held.lse[m] = out_in, lse
            computed = plan.slabs(out_in)
            out.index_copy_(0, index.home + m, computed.index_select(0, index.home_at))
            if plan.moves_queries:
                returning.append(self._queries_home(computed))
        for m, transfer in enumerate(returning):
            out.index_copy_(0, index.sent + m, transfer.wait())
        if self.remember == "refetch":
            # Of their own, for a slice would keep all of it.
            held = held._replace(queries=q.new_empty(0), keys=q.new_empty(0))
        return out.view_as(q), held

    def backward(self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, held: _Held) -> tuple[Tensor, Tensor, Tensor]:
        if (segments := self.prepared.documents_at_home) is not None:
            return self._backward_at_home(grad_out, q, k, v, held, segments)
        plan, chunks = self.prepared, self.prepared.chunks
        index = plan.index(q.device)
        slabs, pairs, grad_slabs = plan.slabs(q), plan.pairs(k, v), plan.slabs(grad_out)
        again = self.remember == "refetch"
        if again:
            empty = _nothing_held(plan, q)
            held = held._replace(queries=empty.queries, keys=empty.keys)
        keys = _KernelKeys(plan, pairs, held.keys)
        grads = _KeyGradients(plan, pairs)
        grad_q = torch.zeros_like(slabs)
        returning: list[_Transfer] = []
        returning_keys: list[tuple[int, _Transfer]] = []

        def dispatch(m: int) -> list[_Transfer]:
            fetched = self._dispatch(slabs, pairs, held, m) if again else []
            return fetched + ([self._queries_out(grad_slabs, m)] if plan.moves_queries else [])

        arriving = dispatch(0)
        for m in range(chunks):
            for transfer in arriving:
                transfer.wait()
            received = arriving[-1].output if plan.moves_queries else None
            arriving = dispatch(m + 1) if m + 1 < chunks else []
            q_in = plan.kernel_queries(slabs, held.queries[m], m)
            grad_in = plan.kernel_queries(grad_slabs, received, m)
            dq, dk, dv = self.kernel.backward(
                grad_in, q_in, *keys.of(m), held.out[m], held.lse[m], plan.segments, **self._mask()
            )
            computed = plan.slabs(dq)
            grad_q.index_copy_(0, index.home + m, computed.index_select(0, index.home_at))
            if plan.moves_queries:
                returning.append(self._queries_home(computed))
            grads.add(m, dk, dv)
            if plan.returns_keys(m):
                returning_keys.append((m, self._keys_home(grads.complete(m), m)))
        for m, transfer in enumerate(returning):
            grad_q.index_copy_(0, index.sent + m, transfer.wait())
        for m, transfer in returning_keys:
            grads.add_returned(m, transfer.wait())
        return grad_q.view_as(q), *grads.result(k)

    def _forward_at_home(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, _Held]:
        """One call on the tensors as they are: nothing to gather, and no chunks where there is nothing to hide."""
        rows, nothing = segments.query_starts[-1], q.new_empty(0)
        out, lse = self.kernel.forward(q[:rows], k[:rows], v[:rows], segments, **self._mask())
        return _with_padding(out, len(q)), _Held(nothing, nothing, out, lse)

    def _backward_at_home(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, held: _Held, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = segments.query_starts[-1]
        dq, dk, dv = self.kernel.backward(
            grad_out[:rows], q[:rows], k[:rows], v[:rows], held.out, held.lse, segments, **self._mask()
        )
        return _with_padding(dq, len(q)), _with_padding(dk, len(q)), _with_padding(dv, len(q))

    def _mask(self) -> dict[str, Any]:
        return {"causal": True, "scale": self.scale, "window": self.prepared.plan.layout.window}

    def _dispatch(self, slabs: Tensor, pairs: Tensor, held: _Held, m: int) -> list[_Transfer]:
        """Queries, keys and values of a chunk on their way to where they are computed on."""
        plan = self.prepared
        transfers = []
        if plan.moves_queries:
            transfers.append(self._queries_out(slabs, m, held.queries[m]))
        if plan.sends_keys(m):
            keys = plan.work.keys[m]
            output = held.keys[plan.key_offset[m] : plan.key_offset[m + 1]]
            sent = pairs.index_select(0, plan.index(pairs.device).keys[m].sent)
            transfers.append(self._transfer(output, sent, keys.received_splits, keys.sent_splits))
        return transfers

    def _queries_out(self, slabs: Tensor, m: int, output: Tensor | None = None) -> _Transfer:
        work, index = self.prepared.work, self.prepared.index(slabs.device)
        output = slabs.new_empty(len(index.remote_at), slabs.shape[1]) if output is None else output
        return self._transfer(output, slabs.index_select(0, index.sent + m), work.received_splits, work.sent_splits)

    def _queries_home(self, computed: Tensor) -> _Transfer:
        work, index = self.prepared.work, self.prepared.index(computed.device)
        output = computed.new_empty(len(index.sent), computed.shape[1])
        return self._transfer(output, computed.index_select(0, index.remote_at), work.sent_splits, work.received_splits)

    def _keys_home(self, gradients: Tensor, m: int) -> _Transfer:
        keys = self.prepared.work.keys[m]
        output = gradients.new_empty(len(keys.added), gradients.shape[1])
        return self._transfer(output, gradients, keys.added_splits, keys.returned_splits)

    def _transfer(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> _Transfer:
        return _Transfer(self.transport.all_to_all(output, input, output_splits, input_splits), output, input)


class _KernelKeys:
    """Keys and values as the kernel is called with them, chunk by chunk; the last ones are kept for the next."""

    def __init__(self, plan: PreparedPlan, pairs: Tensor, received: Tensor) -> None:
        self._plan, self._pairs, self._received = plan, pairs, received
        self._last: tuple[Tensor, Tensor] | None = None

    def of(self, m: int) -> tuple[Tensor, Tensor]:
        """`k` and `v`, `[Tk, heads, D]` each."""
        keys = self._plan.work.keys[m]
        if self._last is None or not keys.same_as_before:
            index = self._plan.index(self._pairs.device).keys[m]
            pairs = self._pairs.new_empty(sum(self._plan.work.key_lengths) * keys.heads, self._pairs.shape[1])
            pairs.index_copy_(0, index.home_at, self._pairs.index_select(0, index.home))
            pairs.index_copy_(0, index.remote_at, self._received.index_select(0, index.remote))
            k, v = pairs.view(-1, keys.heads, 2, self._pairs.shape[1] // 2).unbind(2)
            self._last = k.contiguous(), v.contiguous()
        return self._last


class _KeyGradients:
    """Gradients of keys and values, summed in float32 at least, always in the same order."""

    def __init__(self, plan: PreparedPlan, pairs: Tensor) -> None:
        self._plan, self._dtype, self._index = plan, pairs.dtype, plan.index(pairs.device)
        wide = torch.promote_types(pairs.dtype, torch.float32)
        self._home = torch.zeros_like(pairs, dtype=wide)
        self._remote = pairs.new_zeros(plan.work.received_keys, pairs.shape[1], dtype=wide)

    def add(self, m: int, dk: Tensor, dv: Tensor) -> None:
        """Add what the kernel gave for a chunk, `[Tk, heads, D]` each."""
        index = self._index.keys[m]
        pairs = torch.stack((dk, dv), dim=2).view(-1, self._home.shape[1]).to(self._home.dtype)
        for rows, at in index.home_layers:
            self._home.index_add_(0, rows, pairs.index_select(0, at))
        for rows, at in index.remote_layers:
            self._remote.index_add_(0, rows, pairs.index_select(0, at))

    def complete(self, m: int) -> Tensor:
        """Gradients of received keys that no later chunk reads, as they go home."""
        return self._remote.index_select(0, self._index.keys[m].returned).to(self._dtype)

    def add_returned(self, m: int, pairs: Tensor) -> None:
        """Add what came home."""
        for rows, at in self._index.keys[m].added_layers:
            self._home.index_add_(0, rows, pairs.index_select(0, at).to(self._home.dtype))

    def result(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `k` and `v`."""
        dk, dv = self._home.to(self._dtype).view(*k.shape[:2], 2, k.shape[2]).unbind(2)
        return dk, dv


def _with_padding(rows: Tensor, count: int) -> Tensor:
    """The rows, and after them as many of zeros as make `count`."""
    padding = count - len(rows)
    return torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:]))) if padding else rows


def _workers(plan: PoolPlan | PreparedPlan) -> int:
    if not isinstance(plan, PoolPlan | PreparedPlan):
        raise TypeError(f"plan is a {type(plan).__name__}: expected a PoolPlan or a PreparedPlan")
    return (plan.plan if isinstance(plan, PreparedPlan) else plan).num_workers


def _check(q: Tensor, k: Tensor, v: Tensor, prepared: PreparedPlan, transport: Transport) -> None:
    plan, work = prepared.plan, prepared.work
    layout = plan.layout
    if (transport.rank, transport.size) != (prepared.worker, plan.num_workers):
        raise ValueError(
            f"the plan is for worker {prepared.worker} of {plan.num_workers} ({plan.num_replicas} replicas of "
            f"{layout.context_parallel}), and this is rank {transport.rank} of {transport.size}"
        )
    for name, tensor, heads in (
        ("q", q, layout.num_heads),
        ("k", k, layout.num_kv_heads),
        ("v", v, layout.num_kv_heads),
    ):
        wanted = (work.rows, heads, layout.head_dim)
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, and the plan has {list(wanted)} at worker {prepared.worker}: "
                "rows at home, heads, head_dim"
            )
    if len({q.dtype, k.dtype, v.dtype}) > 1 or len({q.device, k.device, v.device}) > 1:
        raise ValueError(
            f"q, k and v have one dtype and device: got {q.dtype} on {q.device}, {k.dtype} on {k.device} and "
            f"{v.dtype} on {v.device}"
        )
    if not q.is_floating_point():
        raise ValueError(f"q, k and v are {q.dtype}: expected a floating-point dtype")
