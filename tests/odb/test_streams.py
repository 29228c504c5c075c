"""Iterable datasets: shared out over ranks and workers without loss or repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from odb_libra_lightning import ODBLoader
from tests.launch import run_ranks
from tests.samples import Documents, identities, pad

SETTINGS = {"l_max": 600, "buffer_size": 16}


class Stream(IterableDataset[Any]):
    """`Documents` in a row; with `shuffle`, in an order drawn from a global generator."""

    def __init__(self, size: int, shuffle: bool = False) -> None:
        self.documents = Documents(size)
        self.shuffle = shuffle
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.documents)).tolist() if self.shuffle else range(len(self.documents))
        for index in order:
            yield self.documents[index]


class AwareStream(Stream):
    """Shares itself out over data workers, as many streams do."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for index in range(worker, len(self.documents), workers):
            yield self.documents[index]


class RankStream(AwareStream):
    """The part of one rank, shared out over its workers."""

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        super().__init__(size)
        self.part = range(rank, size, world_size)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for index in self.part[worker::workers]:
            yield self.documents[index]


def epochs(loader: ODBLoader, count: int = 2) -> list[list[int]]:
    return [[i for batch in loader for i in identities(batch)] for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "stream", [Stream(50), Stream(50, shuffle=True), AwareStream(50)], ids=["plain", "random", "aware"]
)
def test_every_sample_once_an_epoch(stream: Stream, workers: int) -> None:
    loader = ODBLoader(stream, pad, num_workers=workers, persistent_workers=workers > 0, **SETTINGS)
    first, second = epochs(loader)
    assert sorted(first) == sorted(second) == list(range(50))
    assert loader.info.samples_total is None
    assert loader.info.samples_done == 50
    assert loader.samples_per_epoch is None
    if stream.shuffle:
        assert first != second
    loader.close()


def test_a_generator_of_samples_will_do() -> None:
    assert sorted(epochs(ODBLoader([Documents(9)[i] for i in range(9)].__iter__(), pad, num_workers=0), 1)[0]) == list(
        range(9)
    )


def two_ranks(kind: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sharding = "loader"
    stream: Stream = Stream(51, shuffle=kind == "random")
    if kind == "dataset":
        stream, sharding = RankStream(51, rank, 2), "dataset"
    loader = ODBLoader(stream, pad, num_workers=2, stream_sharding=sharding, **SETTINGS)
    seen, steps = [], []
    for _ in range(2):
        steps.append(0)
        for batch in loader:
            steps[-1] += 1
            if loader.info.indices:
                seen += identities(batch)
    loader.close()
    dist.destroy_process_group()
    return {"seen": seen, "steps": steps}


@pytest.mark.parametrize("kind", ["plain", "random", "dataset"])
def test_two_ranks_of_two_workers_have_no_duplicates_and_no_losses(kind: str, tmp_path: Path) -> None:
    ranks = run_ranks(two_ranks, 2, tmp_path, kind=kind)
    assert ranks[0]["steps"] == ranks[1]["steps"]
    counts = Counter(i for rank in ranks for i in rank["seen"])
    assert counts == Counter(dict.fromkeys(range(51), 2))


def test_a_cap_ends_an_endless_stream() -> None:
    class Endless(Stream):
        def __iter__(self) -> Iterator[Any]:
            number = 0
            while True:
                yield {"input_ids": torch.full((3,), number)}
                number += 1

    def first(samples: list[Any]) -> list[int]:
        return [int(sample["input_ids"][0]) for sample in samples]

    loader = ODBLoader(Endless(1), first, num_workers=0, max_samples=40, loss_tokens=len, **SETTINGS)
    assert sorted(i for batch in loader for i in batch) == list(range(40))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_with_what_is_not_trained_on(workers: int) -> None:
    first = ODBLoader(Stream(60, shuffle=True), pad, num_workers=workers, **SETTINGS)
    before: list[int] = []
    for batch in first:
        before += identities(batch)
        if len(before) > 20:
            break
    state = first.state_dict()
    second = ODBLoader(Stream(60, shuffle=True), pad, num_workers=2 - workers, **SETTINGS)
    second.load_state_dict(state)
    rest, after = epochs(second)
    assert sorted(before + rest) == sorted(after) == list(range(60))


def test_a_stream_that_fails_says_where() -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from (self.documents[i] for i in range(5))
            raise OSError("the disk is gone")

    with pytest.raises(RuntimeError, match="rank 0: sample 5: OSError: the disk is gone"):
        list(ODBLoader(Broken(9), pad, num_workers=1, **SETTINGS))


def test_random_augmentation_does_not_depend_on_workers_or_on_what_was_read_before() -> None:
    class Noisy(Documents):
        def __getitem__(self, index: int) -> Any:
            noise = torch.rand(1).item() + np.random.rand()
            return {**super().__getitem__(index), "noise": noise}

    def noise(samples: list[Any]) -> dict[int, float]:
        return {int(sample["input_ids"][0]): sample["noise"] for sample in samples}

    def drawn(workers: int, epoch: int, state: Any = None) -> dict[int, float]:
        loader = ODBLoader(Noisy(40), noise, num_workers=workers, loss_tokens=len, **SETTINGS)
        if state:
            loader.load_state_dict(state)
        else:
            loader.set_epoch(epoch)
        return {k: v for batch in loader for k, v in batch.items()}

    torch.manual_seed(1)
    before = torch.get_rng_state()
    whole = drawn(0, 1)
    assert torch.equal(torch.get_rng_state(), before), "the trainer's own randomness is left alone"
    assert whole == drawn(2, 1) != drawn(0, 0)
    broken = ODBLoader(Noisy(40), noise, num_workers=0, loss_tokens=len, **SETTINGS)
    broken.set_epoch(1)
    begun = next(iter(broken))
    assert {**begun, **drawn(1, 1, broken.state_dict())} == whole


def test_a_stream_that_shares_itself_out_goes_on_with_as_many_workers_only() -> None:
    settings = {"stream_sharding": "dataset", **SETTINGS}
    first = ODBLoader(AwareStream(60), pad, num_workers=1, **settings)
    next(iter(first))
    state = first.state_dict()
    first.close()
    with pytest.raises(ValueError, match="num_workers=1, and this loader has 2"):
        ODBLoader(AwareStream(60), pad, num_workers=2, **settings).load_state_dict(state)
    with pytest.raises(ValueError, match="stream_sharding=dataset, and this loader has loader"):
        ODBLoader(AwareStream(60), pad, num_workers=1, **SETTINGS).load_state_dict(state)


def test_a_stream_whose_iterator_is_falsy_ends() -> None:
    class Falsy:
        def __init__(self) -> None:
            self.left = 7

        def __iter__(self) -> Falsy:
            return self

        def __next__(self) -> dict[str, torch.Tensor]:
            if self.left == 0:
                raise StopIteration
            self.left -= 1
            return Documents(9)[self.left]

        def __len__(self) -> int:
            return 0

    assert len(epochs(ODBLoader(Falsy(), pad, num_workers=0, **SETTINGS), 1)[0]) == 7
