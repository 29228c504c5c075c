"""The loader in one process."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from odb_libra_lightning import ODBLoader
from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.errors import ODBError, PeerLostError
from odb_libra_lightning.odb.ledger import EpochLedger
from odb_libra_lightning.odb.source import SampleSource
from tests.launch import REPOSITORY, session_ends, start, wait_all
from tests.odb.broken import FAULTS, broken_loader
from tests.samples import Documents, identities, pad


def one_epoch(loader: ODBLoader) -> list[list[int]]:
    return [identities(batch) for batch in loader]


SLOW_START = [pytest.param(method, False, marks=pytest.mark.full) for method in ("spawn", "forkserver")]


@pytest.mark.parametrize(
    ("start_method", "persistent"),
    [("fork", False), ("fork", True), ("main process", False), ("spawn", True), ("forkserver", True), *SLOW_START],
)
def test_two_epochs_hold_every_sample_once_in_new_orders(start_method: str, persistent: bool) -> None:
    settings: dict[str, Any] = {"num_workers": 0} if start_method == "main process" else {"start_method": start_method}
    loader = ODBLoader(
        Documents(150), pad, l_max=1000, buffer_size=64, persistent_workers=persistent, **{"num_workers": 2, **settings}
    )
    epochs = [one_epoch(loader) for _ in range(2)]
    loader.close()
    for batches in epochs:
        assert Counter(i for batch in batches for i in batch) == Counter(range(150))
    assert epochs[0] != epochs[1]


def test_workers_or_none_give_the_same_batches() -> None:
    def batches(workers: int) -> list[list[int]]:
        return one_epoch(ODBLoader(Documents(120), pad, l_max=900, buffer_size=50, num_workers=workers))

    assert batches(0) == batches(1) == batches(3)


def test_facts_fit_the_batch_at_hand_and_earlier_ones() -> None:
    loader = ODBLoader(Documents(80), pad, l_max=1000, num_workers=0)
    with pytest.raises(LookupError, match="not given out a batch yet"):
        _ = loader.info
    for number, batch in enumerate(loader):
        info = loader.info
        assert info.batch_idx == number
        assert list(info.indices) == identities(batch)
        assert info.padded_tokens == batch["input_ids"].numel() <= 1000
        assert info.loss_tokens == int((batch["labels"][:, 1:] != -100).sum())
        assert info.loss_weight == 1.0
        assert info.wait_s > 0
    assert loader.info_at(number - 1).batch_idx == number - 1
    with pytest.raises(LookupError, match="batch 999"):
        loader.info_at(999)
    assert info.samples_done == info.samples_total == loader.samples_per_epoch == 80


def test_the_loader_has_no_length_since_nobody_knows_it() -> None:
    with pytest.raises(TypeError):
        len(ODBLoader(Documents(3), pad, num_workers=0))  # type: ignore[arg-type]


def test_leaving_a_loop_early_ends_the_processes_and_the_next_pass_is_whole() -> None:
    loader = ODBLoader(Documents(150), pad, l_max=500, num_workers=1, persistent_workers=True)
    for _ in loader:
        break
    assert Counter(i for batch in one_epoch(loader) for i in batch) == Counter(range(150))
    loader.close()


def test_asking_for_an_iterator_starts_nothing() -> None:
    loader = ODBLoader(Documents(10), pad, num_workers=2)
    iter(loader)
    assert loader._feed is None


def test_set_epoch_replays_an_order() -> None:
    loader = ODBLoader(Documents(60), pad, l_max=500, num_workers=0)
    first, second = one_epoch(loader), one_epoch(loader)
    loader.set_epoch(0)
    assert one_epoch(loader) == first != second


def test_a_loader_can_be_sent_to_another_process() -> None:
    loader = pickle.loads(pickle.dumps(ODBLoader(Documents(9), pad, l_max=600, num_workers=0, accumulation=2)))
    assert sorted(one_epoch(loader)) == sorted(one_epoch(ODBLoader(Documents(9), pad, l_max=600, num_workers=0)))
    assert loader.info.accumulation == 2


@pytest.mark.parametrize("count", [None, 1.5, float("nan"), "3"])
def test_a_count_of_loss_tokens_that_is_no_number_is_refused(count: Any) -> None:
    with pytest.raises(ODBError, match="what loss_tokens returns must be a whole number of tokens"):
        one_epoch(ODBLoader(Documents(2), pad, num_workers=0, loss_tokens=lambda batch: count))


def test_two_passes_at_once_are_refused() -> None:
    loader = ODBLoader(Documents(30), pad, l_max=600, num_workers=0)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="another pass over it has begun"):
        next(first)


@pytest.mark.parametrize("epoch", [-1, 1.5, None, True, 2**70])
def test_what_is_no_number_of_an_epoch_is_refused(epoch: Any) -> None:
    with pytest.raises(ValueError, match="epoch must be a whole number"):
        ODBLoader(Documents(9), pad).set_epoch(epoch)


@pytest.mark.parametrize("length", [0.5, 3.7, "7", True, float("nan")])
def test_a_length_that_is_no_whole_number_is_refused(length: Any) -> None:
    with pytest.raises(ODBError, match="sample 0: ValueError"):
        one_epoch(ODBLoader(Documents(1), pad, num_workers=0, length_fn=lambda sample: length))


@pytest.mark.parametrize("length", [3, 3.0, torch.tensor(3), np.int32(3)])
def test_a_length_may_be_any_type_of_number(length: Any) -> None:
    loader = ODBLoader(Documents(1), pad, num_workers=0, length_fn=lambda sample: length)
    one_epoch(loader)
    assert loader.info.lengths == (3,)


def test_set_epoch_begins_an_epoch_that_was_left_anew() -> None:
    loader = ODBLoader(Documents(30), pad, l_max=600, num_workers=0)
    loader.set_epoch(3)
    first = identities(next(iter(loader)))
    loader.set_epoch(3)
    assert identities(next(iter(loader))) == first
    assert loader.info.epoch == 3


def test_a_thousand_samples_of_five_tensors_need_few_files() -> None:
    """Under a low limit of open files, as many machines have it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        loader = ODBLoader(FiveTensors(1100), stack, l_max=400, num_workers=2)
        assert sum(len(batch["a"]) for batch in loader) == 1100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class FiveTensors(Documents):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.full((4,), index) for name in "abcde"} | {"length": torch.tensor(4)}


def stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


# ---- bad input, one process


@pytest.mark.parametrize(
    ("dataset", "settings", "says"),
    [
        ([], {}, "training dataset is empty"),
        (object(), {}, "or an iterable one, with __iter__; got a object"),
        ([1], {"collate_fn": 3}, "collate_fn must be a function or None, got 3"),
        ([1], {"ignore_index": None}, "ignore_index must be a whole number, got None"),
        ([1], {"length_fn": 5}, "length_fn must be a function or None, got 5"),
        ([1], {"timeout": 1e12}, "timeout must be at most .* a year"),
        ([1], {"cost": "quadratic"}, "cost='quadratic' goes with quadratic_length"),
        ([1], {"max_samples": 0}, "max_samples must be a whole number of at least 1"),
        ([1], {"rank": 0, "world_size": 0}, "world_size must be at least 1, got 0"),
        ([1], {"replica_size": 2}, "replica_size must be at least 1, and .* needs rank"),
        ([1], {"l_max": 0}, "l_max must be a whole number of at least 1, got 0"),
        ([1], {"l_max": 2.5}, "l_max must be a whole number of at least 1, got 2.5"),
        ([1], {"oversize": "split"}, "oversize must be one of .* got 'split'"),
        ([1], {"loss_scaling": "tokens"}, "loss_scaling must be one of .* got 'tokens'"),
        ([1], {"num_workers": -1}, "num_workers must be a whole number of at least 0"),
        ([1], {"prefetch_factor": 0}, "prefetch_factor must be a whole number of at least 1"),
        ([1], {"prefetch_factor": 2.5}, "prefetch_factor must be a whole number of at least 1, got 2.5"),
        ([1], {"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ([1], {"pacing": "no"}, "pacing must be True or False, got 'no'"),
        ([1], {"accumulation": 0}, "accumulation must be a whole number of at least 1 micro-batch, got 0"),
        ([1], {"rank": 0}, "both rank and world_size or neither"),
        ([1], {"rank": 0, "world_size": 2}, "1 sample for 2 ranks"),
        ([1, 2], {"rank": 2, "world_size": 2}, "rank must lie in 0..1, got 2"),
    ],
)
def test_what_cannot_work_is_refused_at_once(dataset: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ODBLoader(dataset, **settings)


def test_a_mistyped_setting_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="unknown setting 'bufer_size', did you mean 'buffer_size'"):
        ODBLoader([1], bufer_size=3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("how", "settings", "says"), FAULTS)
def test_a_bad_sample_is_one_error_with_the_original_text(
    how: str, settings: dict[str, Any], says: str, workers: int
) -> None:
    with pytest.raises(ODBError, match=f"rank 0: {says}") as error:
        one_epoch(broken_loader(how, num_workers=workers, **settings))
    if how in ("raises", "bad collate"):
        assert "Traceback (most recent call last)" in str(error.value)


@pytest.mark.parametrize(("how", "settings"), [("long", {"oversize": "drop"}), ("empty", {"empty": "drop"})])
def test_dropped_samples_are_left_out_and_counted(how: str, settings: dict[str, Any]) -> None:
    loader = broken_loader(how, num_workers=1, **settings)
    batches = one_epoch(loader)
    assert Counter(i for batch in batches for i in batch) == Counter(set(range(100)) - {57})
    assert loader.info.samples_done == 100


def test_an_epoch_of_which_all_is_dropped_says_so() -> None:
    loader = ODBLoader(Documents(10), pad, l_max=1, num_workers=0, oversize="drop")
    with pytest.warns(UserWarning, match="epoch 0 has no batch: every sample was dropped"):
        assert list(loader) == []


def test_a_worker_that_is_killed_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(ODBError, match=r"rank 0: DataLoader worker .*exited unexpectedly"):
        one_epoch(broken_loader("dies", num_workers=1))


def test_a_collate_process_that_is_killed_is_an_error_and_not_a_hang() -> None:
    loader = ODBLoader(Documents(200), pad, l_max=400, num_workers=1)
    batches = iter(loader)
    next(batches)
    os.kill(loader._feed._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    with pytest.raises(PeerLostError, match="its collate process ended by signal 9"):
        list(batches)


def test_the_first_batch_may_be_drawn_in_a_thread_that_ends() -> None:
    loader = ODBLoader(Documents(60), pad, l_max=500, num_workers=1)
    batches, first = iter(loader), []
    thread = threading.Thread(target=lambda: first.append(next(batches)))
    thread.start()
    thread.join(30)
    seen = [i for batch in [*first, *batches] for i in identities(batch)]
    assert Counter(seen) == Counter(range(60))


TRAINER = """
import os, signal, sys
sys.path.insert(0, {root!r})
from odb_libra_lightning import ODBLoader
from tests.samples import Documents, pad
if __name__ == "__main__":
    loader = ODBLoader(Documents(3000), pad, l_max=300, num_workers=2, start_method={start_method!r})
    next(iter(loader))
    print("training", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_nothing_survives_a_training_process_that_is_killed(start_method: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER.format(root=str(REPOSITORY), start_method=start_method))
    with (tmp_path / "log").open("w+") as log:
        process = start([sys.executable, str(script)], log)
        try:
            assert process.wait(90) == -signal.SIGKILL
            assert session_ends(process, within=20)
        finally:
            wait_all([process], 1)
            log.seek(0)
            assert "training" in log.read()


class Slow(Documents):
    def __getitem__(self, index: int) -> Any:
        time.sleep(60)


def test_a_dataset_that_hangs_is_an_error_after_the_time_limit() -> None:
    with pytest.raises(ODBError, match=r"rank 0: no sample from the data workers within 0.75 s"):
        one_epoch(ODBLoader(Slow(10), pad, num_workers=1, timeout=1))


def test_the_source_tells_where_every_view_is() -> None:
    source = SampleSource(Documents(100), LoaderConfig(l_max=8192, num_workers=2, buffer_size=40), rank=1)
    ledger = EpochLedger(100, 2, equal=True)
    source.start(ledger)
    assert source.in_sampler + source.in_workers == 50
    taken = source.take(30)
    assert len(taken) == 30
    assert source.in_sampler + source.in_workers == 20
    rest = source.take(500)
    order = np.random.default_rng([0, 0]).permutation(100)
    assert [(s.view, s.identity) for s in taken + rest] == [(v, order[v]) for v in range(1, 100, 2)]
    assert source.in_sampler == source.in_workers == 0
    source.close()


def test_a_pass_that_gave_out_nothing_does_not_count_as_an_epoch() -> None:
    class FailsOnce(Documents):
        failed = False

        def __getitem__(self, index: int) -> Any:
            if not FailsOnce.failed:
                FailsOnce.failed = True
                raise OSError("not mounted yet")
            return super().__getitem__(index)

    loader = ODBLoader(FailsOnce(30), pad, l_max=600, num_workers=0)
    with pytest.raises(ODBError, match="not mounted yet"):
        list(loader)
    assert Counter(i for batch in one_epoch(loader) for i in batch) == Counter(range(30))
    assert loader.info.epoch == 0
