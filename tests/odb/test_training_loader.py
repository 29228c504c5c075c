"""What every loader tells: its passes, each batch as it is drawn, and honest padding."""

from __future__ import annotations

from typing import Any

import pytest

from odb_libra_lightning import ODBLoader, PackingCollator
from odb_libra_lightning.odb.errors import ODBError
from odb_libra_lightning.odb.training_loader import TrainingLoader
from tests.samples import Documents, pad


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_batch_is_announced_before_it_is_given_out(num_workers: int) -> None:
    loader = ODBLoader(Documents(40), pad, l_max=900, buffer_size=16, num_workers=num_workers)
    events: list[Any] = []
    loader.on_pass = lambda: events.append("pass")
    loader.on_batch = lambda batch: events.append(("drawn", id(batch)))
    for _ in range(2):
        kept = []
        for batch in loader:
            kept.append(batch)  # so that no other object gets its id
            assert events[-1] == ("drawn", id(batch))
        assert [event for event in events if event == "pass"] == ["pass"]
        assert len(events) == 1 + len(kept)
        events.clear()


def test_facts_of_the_epoch_are_asked_of_any_loader() -> None:
    loader = ODBLoader(Documents(40), pad, l_max=900, buffer_size=16, num_workers=0)
    assert isinstance(loader, TrainingLoader)
    assert (loader.samples_done, loader.loss_scaling) == (0, "token")
    for _ in loader:
        assert loader.samples_done in (loader.info.samples_done, 0)  # 0: the epoch is through
    assert loader.account is not None
    assert loader.account.emitted == 40


def test_a_pack_has_no_padding_and_a_padded_batch_has() -> None:
    settings = {"l_max": 900, "buffer_size": 16, "num_workers": 0}
    for collate, packed in ((PackingCollator(), True), (pad, False)):
        loader = ODBLoader(Documents(40), collate, **settings)
        for batch in loader:
            info = loader.info
            assert info.padded_tokens == info.global_padded_tokens == batch["input_ids"].numel()
            if packed:
                assert info.padded_tokens == info.tokens
                assert info.loss_tokens == info.tokens - info.samples, "all but each sample's first token"


def test_a_loader_tells_the_ranks_it_was_given_or_else_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"l_max": 900, "buffer_size": 16, "num_workers": 0}
    given = ODBLoader(Documents(40), pad, rank=1, world_size=3, replica_size=2, **settings)
    alone = ODBLoader(Documents(40), pad, **settings)
    assert (given.ranks, given.replica_size) == ((1, 3), 2)
    assert (alone.ranks, alone.replica_size) == ((0, 1), 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert given.ranks == (1, 3)
    with pytest.raises(ODBError, match="there is no process group"):
        _ = alone.ranks
