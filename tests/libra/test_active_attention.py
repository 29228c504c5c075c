"""`core_attention`: alone against masked dense attention, and what it hands to whoever is active."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from odb_libra_lightning.libra.active_attention import activate, active, core_attention, deactivate


def dense(
    q: Tensor, k: Tensor, v: Tensor, documents: list[list[int]], window: int | None, scale: float | None
) -> Tensor:
    """Attention of every sequence of a batch, `[batch, T, heads, D]`, by one mask."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    masks = []
    for lengths in documents:
        owner = torch.tensor([number for number, count in enumerate(lengths) for _ in range(count)])
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        mask = (owner[:, None] == owner[None]) & (distance >= 0)
        masks.append(mask if window is None else mask & (distance < window))
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(group, 2)) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~torch.stack(masks)[:, None], float("-inf"))
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.repeat_interleave(group, 2))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("documents", [[[5, 1, 6]], [[12], [4, 8]]])
def test_alone_it_is_attention_within_documents(
    documents: list[list[int]], window: int | None, scale: float | None
) -> None:
    torch.manual_seed(0)
    shape = len(documents), 12
    q, k, v = (torch.randn(*shape, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    positions = torch.tensor([[at for length in lengths for at in range(length)] for lengths in documents])
    out = core_attention(q, k, v, position_ids=positions, window=window, scale=scale)
    expected = dense(q, k, v, documents, window, scale)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * weight).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)


def test_without_positions_a_row_of_the_batch_is_a_document() -> None:
    q = torch.randn(2, 6, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(core_attention(q, q, q), dense(q, q, q, [[6], [6]], None, None))
    torch.testing.assert_close(core_attention(q[0], q[0], q[0]), dense(q[:1], q[:1], q[:1], [[6]], None, None)[0])
    one_row = torch.tensor([[0, 1, 0, 1, 2, 3]])
    torch.testing.assert_close(
        core_attention(q, q, q, position_ids=one_row), dense(q, q, q, [[2, 4], [2, 4]], None, None)
    )


def test_positions_that_change_are_read_again() -> None:
    q, positions = torch.randn(1, 6, 2, 8), torch.tensor([[0, 1, 2, 3, 4, 5]])
    for documents in ([6], [4, 2], [2, 4]):
        positions.copy_(torch.tensor([[at for length in documents for at in range(length)]]))
        for _ in range(2):
            out = core_attention(q, q, q, position_ids=positions)
            torch.testing.assert_close(out, dense(q, q, q, [documents], None, None))
    with torch.inference_mode():
        fixed = torch.tensor([[0, 1, 0, 1, 0, 1]])
        torch.testing.assert_close(core_attention(q, q, q, position_ids=fixed), dense(q, q, q, [[2, 2, 2]], None, None))


def test_no_rows_give_no_rows() -> None:
    q = torch.randn(1, 0, 2, 8, requires_grad=True)
    out = core_attention(q, q, q)
    assert out.shape == q.shape
    out.sum().backward()  # type: ignore[no-untyped-call]


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], int | None, float | None]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        self.calls.append((tuple(q.shape), window, scale))
        return q + 1


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    activate(recorder)
    yield recorder
    deactivate(recorder)
    assert active() is None


def test_the_active_one_attends(recorder: Recorder) -> None:
    q = torch.randn(1, 6, 2, 8)
    assert core_attention(q, q, q, window=4, scale=0.5).equal(q + 1)
    assert core_attention(q[0], q[0], q[0]).equal(q[0] + 1)
    assert recorder.calls == [((6, 2, 8), 4, 0.5), ((6, 2, 8), None, None)]
    other = Recorder()
    activate(other)
    assert active() is other
    deactivate(other)
    deactivate(other)  # again does nothing
    assert active() is recorder


def test_several_sequences_are_refused_where_one_is_shared(recorder: Recorder) -> None:
    q = torch.randn(2, 6, 2, 8)
    with pytest.raises(ValueError, match=r"a batch of 2 sequences under context parallelism: .*PackingCollator"):
        core_attention(q, q, q)


def test_shapes_are_checked() -> None:
    q = torch.randn(6, 8)
    with pytest.raises(ValueError, match=r"2, 2 and 2 dimensions: expected \[batch, T, heads, head_dim\]"):
        core_attention(q, q, q)
    q = torch.randn(2, 6, 2, 8)
    with pytest.raises(ValueError, match=r"position_ids \[1, 5\] for 2 sequences of 6 tokens"):
        core_attention(q, q, q, position_ids=torch.zeros(1, 5))
