"""Exchanges between threads: what arrives, who is missing, who disagrees, and what the wrappers show."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from odb_libra_lightning.libra.thread_transport import DelayedTransport, Hub, ThreadTransport, run_workers
from odb_libra_lightning.libra.transport import Handle, Transport
from tests.libra.poisoned_transport import PoisonedTransport

# Rows that each worker sends to each: some send nothing, one sends nothing to anybody.
ROWS = [[1, 0, 2], [0, 0, 0], [3, 1, 0]]


def begin(transport: Transport, rows: list[list[int]] = ROWS, width: int = 2) -> tuple[torch.Tensor, Handle]:
    """Send rows that hold `10 * sender + receiver`."""
    rank = transport.rank
    sent, received = rows[rank], [each[rank] for each in rows]
    numbers = [10 * rank + receiver for receiver, count in enumerate(sent) for _ in range(count)]
    input = torch.tensor(numbers, dtype=torch.float32)[:, None].repeat(1, width)
    output = torch.full((sum(received), width), -1.0)
    return output, transport.all_to_all(output, input, received, sent)


def test_rows_arrive_in_order_of_the_workers() -> None:
    def work(transport: ThreadTransport) -> list[float]:
        output, handle = begin(transport)
        handle.wait()
        handle.wait()
        return output[:, 1].tolist()

    assert run_workers(work, 3) == [[0, 20, 20, 20], [21], [2, 2]]


def test_the_call_returns_before_the_others_come() -> None:
    hub = Hub(3, timeout=5)
    transports = [hub.transport(rank) for rank in range(3)]
    # One thread plays all workers, with two exchanges in flight.
    first = [begin(transports[0]), begin(transports[0], width=1)]
    others = [(begin(each), begin(each, width=1)) for each in transports[1:]]
    for _, handle in (*first, *others[0], *others[1]):
        handle.wait()
    assert first[0][0].tolist() == [[0, 0], [20, 20], [20, 20], [20, 20]]
    assert first[1][0].tolist() == [[0], [20], [20], [20]]


def test_the_error_names_those_who_did_not_come() -> None:
    hub = Hub(4, timeout=0.05)
    rows = [[0] * 4] * 4
    _, handle = begin(hub.transport(2), rows)
    begin(hub.transport(0), rows)
    with pytest.raises(TimeoutError, match=r"worker 2 .* exchange 0: of 4 workers, numbers 1, 3 did not come"):
        handle.wait()


def test_the_error_names_those_who_disagree() -> None:
    hub = Hub(3, timeout=5)
    wrong = [list(each) for each in ROWS]
    wrong[2][0] = 5
    handles = [begin(hub.transport(rank), wrong if rank == 2 else ROWS)[1] for rank in range(3)]
    for handle in handles:
        with pytest.raises(ValueError, match="exchange 0: worker 2 sends 5 rows to worker 0, which expects 3"):
            handle.wait()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(1, 2, dtype=torch.bfloat16), r"rows of float32 \[2\] to worker 1, which expects bfloat16 \[2\]"),
        (torch.zeros(1, 3), r"rows of float32 \[2\] to worker 1, which expects float32 \[3\]"),
    ],
)
def test_rows_of_another_kind(output: torch.Tensor, message: str) -> None:
    hub = Hub(2, timeout=5)
    handle = hub.transport(0).all_to_all(torch.zeros(0, 2), torch.zeros(1, 2), [0, 0], [0, 1])
    hub.transport(1).all_to_all(output, torch.zeros(0, 2), [1, 0], [0, 0])
    with pytest.raises(ValueError, match=f"worker 0 sends {message}"):
        handle.wait()


def test_splits_that_are_not_those_of_the_tensor() -> None:
    transport = Hub(2).transport(1)
    rows = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"output_splits=\[1, 1\] of worker 1: 2 numbers.* the 3 rows of `output`"):
        transport.all_to_all(rows, rows, [1, 1], [1, 2])
    with pytest.raises(ValueError, match=r"input_splits=\[4, -1\]"):
        transport.all_to_all(rows, rows, [1, 2], [4, -1])
    with pytest.raises(ValueError, match=r"input_splits=\[3\]"):
        transport.all_to_all(rows, rows, [1, 2], [3])
    with pytest.raises(ValueError, match="`input` of worker 1 is not contiguous"):
        transport.all_to_all(rows, torch.zeros(2, 3).t(), [1, 2], [1, 2])
    with pytest.raises(ValueError, match="rank=2: this hub has 2 workers"):
        Hub(2).transport(2)
    with pytest.raises(ValueError, match="size=0"):
        Hub(0)


def test_the_first_error_is_raised_and_nobody_waits_on() -> None:
    def work(transport: ThreadTransport) -> None:
        if transport.rank == 1:
            raise LookupError("worker 1 has no data")
        begin(transport)[1].wait()

    start = time.monotonic()
    with pytest.raises(LookupError, match="worker 1 has no data"):
        run_workers(work, 3, timeout=100)
    assert time.monotonic() - start < 100


def test_a_worker_that_does_not_return_is_named() -> None:
    release = threading.Event()

    def work(transport: ThreadTransport) -> None:
        if transport.rank != 1:
            release.wait(50)

    with pytest.raises(TimeoutError, match=r"after 0.2 s workers 0, 2 of 3 have not returned"):
        run_workers(work, 3, timeout=0.2)
    release.set()


def test_backward_runs_in_the_worker_that_calls_it() -> None:
    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, transport):  # type: ignore[no-untyped-def]
            ctx.transport = transport
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            begin(ctx.transport)[1].wait()  # would wait for ever if one thread ran all of them
            return grad * threading.get_ident(), None

    def work(transport: ThreadTransport) -> bool:
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        Meeting.apply(x, transport).backward()
        return x.grad is not None and x.grad.item() == float(threading.get_ident())

    assert run_workers(work, 3) == [True] * 3


def test_a_delayed_transfer_lets_its_caller_go_on() -> None:
    hub = Hub(2, timeout=5)
    transports = [DelayedTransport(hub.transport(rank), 0.05) for rank in range(2)]
    rows = [[1, 2], [3, 4]]
    before = time.monotonic()
    pending = [begin(each, rows) for each in transports]
    called = time.monotonic()
    for _, handle in pending:
        handle.wait()
        handle.wait()
    (event,) = transports[0].events
    assert before <= event.begin <= called
    assert event.end - event.begin >= 0.05
    assert (event.kind, event.sent_bytes) == ("all_to_all", 2 * 2 * 4)
    assert [each.sent_bytes for each in transports[1].events] == [3 * 2 * 4]
    assert pending[1][0][:, 0].tolist() == [1, 1, 11, 11, 11, 11]


def test_poison_is_where_nobody_may_look() -> None:
    hub = Hub(2, timeout=5)
    transports = [PoisonedTransport(hub.transport(rank)) for rank in range(2)]
    outputs, inputs = [torch.zeros(2) for _ in range(2)], [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    handles = [each.all_to_all(outputs[each.rank], inputs[each.rank], [1, 1], [1, 1]) for each in transports]
    assert all(output.isnan().all() for output in outputs)
    assert inputs[0].tolist() == [1, 2]
    for handle in handles:
        handle.wait()
    assert [output.tolist() for output in outputs] == [[1, 3], [2, 4]]
    assert [input.tolist() for input in inputs] == [[1, 2], [3, 4]]
    outputs[0].zero_()
    handles[0].wait()  # a second time does nothing
    assert outputs[0].tolist() == [0, 0]


@pytest.mark.parametrize("side", ["output", "input"])
def test_poison_notices_who_writes_too_early(side: str) -> None:
    transport = PoisonedTransport(Hub(1, timeout=5).transport(0))
    buffers = {"output": torch.zeros(2), "input": torch.ones(2)}
    handle = transport.all_to_all(buffers["output"], buffers["input"], [2], [2])
    buffers[side][1] = 7
    with pytest.raises(RuntimeError, match=f"worker 0 has written to an {side} before"):
        handle.wait()
    with pytest.raises(ValueError, match=r"floating-point.*torch.int64"):
        transport.all_to_all(torch.zeros(2, dtype=torch.int64), torch.zeros(2), [2], [2])
