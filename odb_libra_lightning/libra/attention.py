"""Exact attention of a pool by a plan: tiles travel to the workers that compute them, forward and backward.

Every worker calls `libra_attention` on the rows it is home to, in the same order. Heads go in `M` chunks: while one is
computed, the next is under way and the last returns, so that of all transfers only the first and the last are not
hidden, as long as a chunk takes longer to compute than to move. All workers take part in the same collectives in the
same order, also those that compute nothing. Source: Libra (arXiv:2607.23250), section 6; the kernel is any of
`libra.kernels`, unmodified.

Shape suffixes: `T` rows at home, `Tq` and `Tk` rows that the kernel is called on, `S = H * M` slices of the heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from odb_libra_lightning.libra.kernel_interface import AttentionKernel, score_scale
from odb_libra_lightning.libra.kernel_keys import KernelKeys, KeyGradients
from odb_libra_lightning.libra.kernels import kernel_for
from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.prepared_plan import PreparedPlan, prepare_plan
from odb_libra_lightning.libra.segments import Segments
from odb_libra_lightning.libra.transport import GroupTransport, Handle, LocalTransport, Transport, agree

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
            of `torch.distributed`, or this process alone where the plan has one worker. One that is passed remembers
            what workers have agreed upon, and saves asking at every call.
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
            is not; another worker that comes with another plan, dtype or option. Nothing has been sent then, unless
            it is the kernel that refuses.
        RuntimeError: a worker that does not answer.

    Under autocast, `q`, `k` and `v` are cast as for `scaled_dot_product_attention`. `torch.compile` breaks its graph
    here. Backward is a collective too: every worker that ran forward must run it, or none.
    """
    out: Tensor = _attend(q, k, v, plan, transport, kernel, scale, remember)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PoolPlan | PreparedPlan,
    transport: Transport | None,
    kernel: str | AttentionKernel | None,
    scale: float | None,
    remember: Remember,
) -> Tensor:
    workers = _workers(plan)
    if transport is None:
        transport = LocalTransport() if workers == 1 else GroupTransport()
    if not isinstance(getattr(transport, "rank", None), int):
        made = "expected a Transport, such as GroupTransport(process_group)"
        raise TypeError(f"transport is a {type(transport).__name__}: {made}")
    if transport.size != workers:
        raise ValueError(
            f"the plan is for {workers} workers, and this transport has {transport.size}: give the pool's, "
            "transport=new_pool_groups(context_parallel=..., pool_size=...).pool"
        )
    prepared = plan if isinstance(plan, PreparedPlan) else prepare_plan(plan, transport.rank)
    q, k, v = (each.to(computed_dtype(each)) for each in (q, k, v))
    _check(q, k, v, prepared, transport)
    if remember not in get_args(Remember):
        raise ValueError(f"remember={remember!r}: choose one of {', '.join(get_args(Remember))}")
    run = _Run(
        prepared=prepared,
        transport=transport,
        kernel=kernel_for(q.device, kernel),
        scale=score_scale(scale, q.shape[-1]),
        remember=remember,
    )
    agree(transport, "libra", prepared.plan.hash, q.dtype, remember, run.scale)
    out: Tensor = _Attention.apply(q, k, v, run)  # type: ignore[no-untyped-call]
    return out


def computed_dtype(tensor: Tensor) -> torch.dtype:
    """What a tensor is cast to here: under autocast as for `scaled_dot_product_attention`, float64 as it is."""
    device = tensor.device.type
    cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    if cast and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: _Run) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, held = run.forward(q, k, v)
        ctx.run = run
        ctx.exchanges_gradients = True  # for whoever walks the graph: not all that leaves here comes from above
        # On every worker as many tensors, empty ones too: recomputation under a checkpoint ends at the last of them.
        ctx.save_for_backward(q, k, v, *held)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *held = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
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


def _room_for_received(plan: PreparedPlan, q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the queries and for the keys and values that come from other workers."""
    received = sum(plan.work.received_splits) if plan.moves_queries else 0
    return (
        q.new_empty(plan.chunks, received, plan.slice_heads * q.shape[2]),
        q.new_empty(plan.work.received_keys, 2 * q.shape[2]),
    )


def _nothing_held(plan: PreparedPlan, q: Tensor) -> _Held:
    """Room for what forward will hold."""
    queries, keys = _room_for_received(plan, q)
    width, rows = plan.slice_heads, plan.segments.query_starts[-1]
    return _Held(
        queries=queries,
        keys=keys,
        out=q.new_empty(plan.chunks, rows, width, q.shape[2]),
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
        out_rows = q.new_zeros(q.shape)  # not a view, so that the caller may write into it
        out = plan.slabs(out_rows)
        keys = KernelKeys(self.prepared, pairs, held.keys)
        home = _Returning(self, out)
        arriving = self._dispatch(slabs, pairs, held, 0)
        for m in range(chunks):
            for transfer in arriving:
                transfer.wait()
            home.arrived()
            arriving = self._dispatch(slabs, pairs, held, m + 1) if m + 1 < chunks else []
            q_in = plan.kernel_queries(slabs, held.queries[m], m)
            out_in, lse = self.kernel.forward(q_in, *keys.of(m), plan.segments, **self._mask())
            held.out[m], held.lse[m] = out_in, lse
            computed = plan.slabs(out_in)
            out[m:].index_copy_(0, index.home, computed.index_select(0, index.home_at))
            home.begin(computed)
        home.finish()
        if self.remember == "refetch":
            # Of their own, for a slice would keep all of it.
            held = held._replace(queries=q.new_empty(0), keys=q.new_empty(0))
        return out_rows, held

    def backward(self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, held: _Held) -> tuple[Tensor, Tensor, Tensor]:
        if (segments := self.prepared.documents_at_home) is not None:
            return self._backward_at_home(grad_out, q, k, v, held, segments)
        plan, chunks = self.prepared, self.prepared.chunks
        index = plan.index(q.device)
        slabs, pairs, grad_slabs = plan.slabs(q), plan.pairs(k, v), plan.slabs(grad_out)
        again = self.remember == "refetch"
        if again:
            queries_again, keys_again = _room_for_received(plan, q)
            held = held._replace(queries=queries_again, keys=keys_again)
        keys = KernelKeys(plan, pairs, held.keys)
        grads = KeyGradients(plan, pairs)
        grad_q = torch.zeros_like(slabs)
        home = _Returning(self, grad_q)
        returning_keys: list[tuple[int, _Transfer]] = []

        def dispatch(m: int) -> list[_Transfer]:
            fetched = self._dispatch(slabs, pairs, held, m) if again else []
            return fetched + ([self._queries_out(grad_slabs, m)] if plan.moves_queries else [])

        arriving = dispatch(0)
        for m in range(chunks):
            for transfer in arriving:
                transfer.wait()
            home.arrived()
            received = arriving[-1].output if plan.moves_queries else None
            arriving = dispatch(m + 1) if m + 1 < chunks else []
            q_in = plan.kernel_queries(slabs, held.queries[m], m)
            grad_in = plan.kernel_queries(grad_slabs, received, m)
            dq, dk, dv = self.kernel.backward(
                grad_in, q_in, *keys.of(m), held.out[m], held.lse[m], plan.segments, **self._mask()
            )
            computed = plan.slabs(dq)
            grad_q[m:].index_copy_(0, index.home, computed.index_select(0, index.home_at))
            home.begin(computed)
            grads.add(m, dk, dv)
            if plan.returns_keys(m):
                returning_keys.append((m, self._keys_home(grads.complete(m), m)))
        home.finish()
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
        return self._transfer(output, slabs[m:].index_select(0, index.sent), work.received_splits, work.sent_splits)

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


class _Returning:
    """Computed slabs on their way home, one chunk at a time: a chunk that is there is put in its place."""

    def __init__(self, run: _Run, rows: Tensor) -> None:
        self._run, self._rows = run, rows
        self._sent = run.prepared.index(rows.device).sent
        self._under_way: deque[tuple[int, _Transfer]] = deque()
        self._begun = 0

    def begin(self, computed: Tensor) -> None:
        """Send the slabs of the next chunk home."""
        if self._run.prepared.moves_queries:
            self._under_way.append((self._begun, self._run._queries_home(computed)))
        self._begun += 1

    def arrived(self) -> None:
        """Take in all but the last: they were sent before what has just arrived."""
        while len(self._under_way) > 1:
            self._take()

    def finish(self) -> None:
        """Take in the rest."""
        while self._under_way:
            self._take()

    def _take(self) -> None:
        m, transfer = self._under_way.popleft()
        self._rows[m:].index_copy_(0, self._sent, transfer.wait())


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
