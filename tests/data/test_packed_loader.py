"""The packed loader: every token once, the same steps on any ranks, all facts right, and exact resumption."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from odb_libra_lightning.data.documents import open_documents
from odb_libra_lightning.data.packed_loader import PackedLoader
from odb_libra_lightning.data.packed_steps import SequencePlacement
from odb_libra_lightning.data.token_files import TokenWriter
from odb_libra_lightning.data.window_log import check_step_equivalence
from odb_libra_lightning.odb.errors import ODBError
from odb_libra_lightning.odb.training_loader import TrainerClock
from tests.data.packed_documents import LONGEST, Numbered, documents_of

SIZE, ROWS = 40, 64


def loader(documents: Any = None, **settings: Any) -> PackedLoader:
    return PackedLoader(open_documents(documents or Numbered(SIZE)), ROWS, **settings)


def replicas(count: int, **settings: Any) -> list[PackedLoader]:
    """The loaders of all replicas, which exchange nothing."""
    return [loader(rank=rank, world_size=count, **settings) for rank in range(count)]


def real(each: PackedLoader, batch: Any) -> list[int]:
    return batch["input_ids"][0].tolist() if each.info.indices else []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("packing", ["best_fit", "sequential"])
def test_every_token_is_in_one_micro_batch_of_one_replica_in_each_epoch(packing: Any, num_workers: int) -> None:
    loaders = replicas(2, packing=packing, num_workers=num_workers, accumulation=3)
    orders = []
    for _ in range(2):
        seen, lengths = [], []
        for each in loaders:
            expected = len(each)
            batches = [real(each, batch) for batch in each]
            assert len(batches) == expected
            seen += [token for batch in batches for token in batch]
            lengths.append(expected)
        assert lengths[0] == lengths[1]
        assert sorted(seen) == Numbered(SIZE).tokens()
        orders.append(seen)
    assert orders[0] != orders[1], "epochs differ"
    for each in loaders:
        each.close()


@pytest.mark.parametrize("masked", [False, True])
def test_labels_and_positions_keep_documents_apart(masked: bool) -> None:
    for batch in loader(Numbered(SIZE, masked=masked)):
        assert sorted(batch) == ["input_ids", "labels", "position_ids"]
        assert {(t.dtype, t.shape) for t in batch.values()} == {(torch.int64, batch["input_ids"].shape)}
        labels = np.split(batch["labels"][0].numpy(), np.flatnonzero(batch["position_ids"][0].numpy() == 0)[1:])
        for ids, bearing in zip(documents_of(batch), labels, strict=True):
            document = ids[0] // LONGEST
            assert (np.diff(ids) == 1).all(), "a piece is a run of rows of one document"
            masks = (ids % 3 == document % 3) if masked else np.zeros(len(ids), bool)
            masks[0] = True
            assert (bearing == np.where(masks, -100, ids)).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("count", "accumulation"), [(1, 1), (3, 1), (2, 3), (4, 2)])
def test_facts_are_those_of_the_batches_on_every_rank(masked: bool, count: int, accumulation: int) -> None:
    """Counted from the batches of all replicas, whose weighted means must add up to the mean over each window."""
    loaders = replicas(count, documents=Numbered(SIZE, masked=masked), accumulation=accumulation)
    steps = []
    for batches in zip(*loaders, strict=True):
        steps.append([(batch, each.info) for batch, each in zip(batches, loaders, strict=True)])
    done = 0
    window: list[Any] = []
    for number, step in enumerate(steps):
        bearing = [int((batch["labels"][:, 1:] != -100).sum()) if info.indices else 0 for batch, info in step]
        tokens = [batch["input_ids"].numel() if info.indices else 0 for batch, info in step]
        done += sum(bool(info.indices) for _, info in step)
        for (batch, info), mine, rows in zip(step, bearing, tokens, strict=True):
            assert (info.batch_idx, info.loss_tokens, info.tokens, info.padded_tokens) == (number, mine, rows, rows)
            assert (info.global_tokens, info.global_padded_tokens) == (sum(tokens), sum(tokens))
            assert info.global_loss_tokens == sum(bearing)
            assert info.global_samples == count - info.idle_ranks == sum(bool(i.indices) for _, i in step)
            assert info.samples_done == done
            if info.indices:
                assert list(info.lengths) == [len(piece) for piece in documents_of(batch)]
            else:
                assert info.loss_weight == 0
        window.append([(info, mine) for (_, info), mine in zip(step, bearing, strict=True)])
        ends = {info.ends_window for _, info in step}
        assert ends == {(number + 1) % accumulation == 0 or number + 1 == len(steps)}
        if ends == {True}:
            total = sum(mine for each in window for _, mine in each)
            for each in window:
                for info, mine in each:
                    assert info.window_loss_tokens == total
                    assert info.loss_weight / (count * accumulation) == pytest.approx(mine / total, rel=1e-12)
            window = []


def log_of(path: Path, count: int, epochs: int = 2, **settings: Any) -> Path:
    loaders = replicas(count, window_log=path, **settings)
    for _ in range(epochs):
        for _ in zip(*loaders, strict=True):
            pass
    return path


def test_a_step_holds_the_same_sequences_whatever_the_degrees(tmp_path: Path) -> None:
    plain = log_of(tmp_path / "1x12", 1, accumulation=12)
    lines = [json.loads(line) for line in plain.read_text().splitlines()]
    for epoch in (0, 1):
        numbers = [n for line in lines if line["epoch"] == epoch for n in line["sequences"]]
        assert numbers == list(range(len(loader()))), "each once"
    for count, pool in [(2, 1), (4, 2), (6, 3), (12, 4)]:
        other = log_of(
            tmp_path / f"{count}",
            count,
            accumulation=12 // count,
            placement=SequencePlacement(pool_size=pool, method="vrsp", refine=True),
        )
        assert check_step_equivalence(plain, other) == len(lines)
    with pytest.raises(ValueError, match="epoch 0, optimizer step 0"):
        check_step_equivalence(plain, log_of(tmp_path / "seed", 1, accumulation=12, seed=1))


def test_something_else_than_a_log_is_refused_by_its_line(tmp_path: Path) -> None:
    good = log_of(tmp_path / "good", 1)
    bad = tmp_path / "bad"
    bad.write_text(good.read_text() + "{}\n")
    with pytest.raises(ValueError, match=f"line {len(bad.read_text().splitlines())}"):
        check_step_equivalence(good, bad)
    with pytest.raises(ValueError, match="No such file"):
        check_step_equivalence(good, tmp_path / "nowhere")


def test_a_batch_is_announced_while_the_one_before_is_trained_on() -> None:
    drawn: list[Any] = []
    each = loader()
    each.on_pass, each.on_batch = drawn.clear, drawn.append
    for _ in range(2):
        for number, batch in enumerate(each):
            assert len(drawn) == min(number + 2, len(each)) or number + 1 == len(drawn)
            assert drawn[number] is batch


@pytest.mark.parametrize(("first", "then"), [((2, 3), (2, 3)), ((2, 3), (3, 2)), ((2, 1), (1, 4)), ((4, 1), (2, 3))])
def test_a_run_goes_on_after_any_window_on_other_ranks_too(first: tuple[int, int], then: tuple[int, int]) -> None:
    whole = [[real(each, batch) for batch in each] for each in replicas(first[0], accumulation=first[1])]
    for stop in range(1, len(whole[0])):
        trained: list[int] = []
        broken = replicas(first[0], accumulation=first[1])
        for number, batches in enumerate(zip(*broken, strict=True), 1):
            trained += [t for each, batch in zip(broken, batches, strict=True) for t in real(each, batch)]
            if number == stop:
                break
        states = [each.state_dict() for each in broken]
        assert all(state["steps"] == states[0]["steps"] == stop - stop % first[1] for state in states)
        full = [t for each in whole for batch in each[: states[0]["steps"]] for t in batch]
        resumed = replicas(then[0], accumulation=then[1])
        rest: list[int] = []
        for each in resumed:
            each.load_state_dict(states[0])
            expected = len(each)
            batches = [real(each, batch) for batch in each]
            assert len(batches) == expected - states[0]["steps"], "the trainer counts on"
            rest += [t for batch in batches for t in batch]
            assert each.info.samples_done == each.info.samples_total
        assert Counter(full) + Counter(rest) == Counter(Numbered(SIZE).tokens())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seed": 3}, "seed=0"),
        ({"packing": "sequential"}, "packing=best_fit"),
        ({"documents": Numbered(7)}, "documents"),
    ],
)
def test_a_state_within_an_epoch_is_refused_by_another_order(changed: dict[str, Any], says: str) -> None:
    first = loader()
    next(iter(first))
    with pytest.raises(ValueError, match=says):
        loader(**changed).load_state_dict(first.state_dict())


def test_an_epoch_has_one_length_until_its_last_batch_is_trained_on() -> None:
    """A run of two replicas goes on as one: its first epoch has another length than the next."""
    begun = replicas(2, accumulation=2)
    for number, _ in enumerate(zip(*begun, strict=True), 1):
        if number == 4:
            break
    whole = len(loader())
    rest = 4 + whole - 2 * 4
    plain, followed = loader(accumulation=2), loader()
    followed.follow(object(), lambda: TrainerClock(accumulation=2, next_step=4), epoch=0)
    for each in (plain, followed):
        each.load_state_dict(begun[0].state_dict())
        lengths = []
        for number, _ in enumerate(each, 4):
            lengths.append(len(each))
            each.mark_trained(number - 1)
        assert lengths == [rest] * (rest - 4)
        each.mark_trained(rest - 1)
        assert len(each) == whole


def test_asking_for_the_length_changes_nothing() -> None:
    """Nor where the trainer has a smaller limit than where training stands, and so begins the next epoch."""
    begun = loader()
    for number, _ in enumerate(begun, 1):
        if number == 5:
            break
    each = loader()
    each.follow(object(), lambda: TrainerClock(limit=3, next_step=None), epoch=0)
    each.load_state_dict(begun.state_dict())
    before = each.state_dict()
    assert len(each) == len(loader())
    assert str(each.state_dict()) == str(before)
    assert (before["epoch"], before["steps"]) == (0, 5)
    pass_over = iter(each)
    assert each.state_dict()["epoch"] == 1, "though the trainer asks for no batch"
    next(pass_over)
    assert (each.info.epoch, each.info.batch_idx) == (1, 0)


def test_a_document_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    class Changing(Numbered):
        reads = 0

        def __getitem__(self, number: int) -> Any:
            self.reads += 1
            return super().__getitem__(number)[: 2 if self.reads > SIZE and number == 5 else None]

    with pytest.raises(ODBError, match=r"packed sequence .*document 5: .*must be the same each time"):
        list(loader(Changing(SIZE)))


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([], "no document lengths"),
        ([torch.tensor([])], "document 0: input_ids of type float32"),
        ([torch.tensor([1]), torch.tensor([], dtype=torch.long)], "document 1 has no tokens"),
        ([{"labels": [1]}], "document 0 has no input_ids"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids and 1 labels"),
        (7, "got a int"),
    ],
)
def test_what_is_no_document_is_refused_by_its_number(documents: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_documents(documents)


def test_token_files_give_the_batches_of_the_documents_they_hold(tmp_path: Path) -> None:
    documents = Numbered(SIZE, masked=True)
    with TokenWriter(tmp_path / "t", vocab_size=SIZE * LONGEST, loss_mask=True) as writer:
        for number in range(SIZE):
            writer.add(documents[number]["input_ids"], loss_mask=documents[number]["labels"] != -100)
    from_files = loader(tmp_path / "t", num_workers=1)
    from_samples = loader(documents)
    for one, other in zip(from_files, from_samples, strict=True):
        assert all(one[name].equal(other[name]) for name in other)
        assert from_files.info.loss_tokens == from_samples.info.loss_tokens
    from_files.close()
