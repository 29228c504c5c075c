"""What goes wrong in training on two ranks: it ends soon, says why, and leaves no process."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_libra_lightning import ODBDataModule, ODBLoader
from odb_libra_lightning.odb.errors import ODBError
from tests.launch import Ended, begin_ranks, children, ends, run_ranks, session_ends, start, wait_all
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad

# A fault ends all within 10 s on a machine that has a core for each rank; these share two with whatever else runs.
LIMIT_S = 45


class ManyDocuments(Documents):
    """More than are trained on within the time limit; numbers stay within the vocabulary of `BigramModel`."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(500)
        self.fault = fault

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if os.environ.get("RANK") == "1" and index > 400:
            if self.fault == "an exception":
                raise OSError("disk on fire")
            if self.fault == "a dataset that hangs":
                time.sleep(1000)
        return super().__getitem__(index % 500)


class MeetsAFault(BigramModel):
    """Says when training is under way, and may do something to its own collate process then."""

    def __init__(self, fault: str, folder: str) -> None:
        super().__init__()
        self.fault, self.folder = fault, Path(folder)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        if batch_idx == 3:
            (self.folder / f"training{self.global_rank}").touch()
            if self.global_rank == 1:
                collate = self.trainer.datamodule.loader._feed._process.pid  # type: ignore[attr-defined]
                hurt(self.fault, collate)
        return super().training_step(batch, batch_idx)


def hurt(fault: str, collate: int) -> None:
    if fault == "a killed collate process":
        os.kill(collate, signal.SIGKILL)
    if fault == "a stopped collate process":
        os.kill(collate, signal.SIGSTOP)
    if fault == "a killed data worker":
        os.kill(children(collate)[0], signal.SIGKILL)


def train(fault: str, folder: str, timeout: float) -> None:
    data = ODBDataModule(
        ManyDocuments(fault),
        pad,
        l_max=500,
        buffer_size=50,
        shuffle=False,
        num_workers=2,
        prefetch_batches=2,
        timeout=timeout,
        start_method="fork",
    )
    quiet_trainer(devices=2, strategy="ddp", max_epochs=1).fit(MeetsAFault(fault, folder), datamodule=data)


@contextmanager
def running(
    function: Callable[..., Any], folder: Path, /, **arguments: Any
) -> Iterator[tuple[list[Popen[str]], Callable[[], list[Ended]]]]:
    """Two ranks under way, and a function that waits for their ends and for those of all that they started."""
    processes = begin_ranks(function, 2, folder, folder=str(folder), **arguments)

    def all_ended() -> list[Ended]:
        deadline = time.monotonic() + LIMIT_S
        for rank, process in enumerate(processes):
            while process.poll() is None:
                assert time.monotonic() < deadline, f"rank {rank} runs on:\n{ends(processes, folder)[rank].output}"
                time.sleep(0.05)
            assert session_ends(process), f"rank {rank} has ended and left a process"
        return ends(processes, folder)

    try:
        deadline = time.monotonic() + 2 * LIMIT_S
        while not all((folder / f"training{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, "no training"
            if any(process.poll() is not None for process in processes):
                break
            time.sleep(0.05)
        yield processes, all_ended
    finally:
        wait_all(processes, 0)


@pytest.mark.parametrize(
    ("fault", "timeout", "says"),
    [
        ("an exception", 100, ("rank 1: sample .*: OSError: disk on fire",) * 2),
        ("a killed data worker", 100, ("rank 1: DataLoader worker",) * 2),
        (
            "a killed collate process",
            100,
            ("rank 0: .*rank", "rank 1: its collate process ended by signal 9 before the epoch did"),
        ),
        pytest.param(
            *("a dataset that hangs", 4, ("rank 1: no sample from the data workers within 3 s",) * 2),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("a stopped collate process", 4, ("rank 0: .*rank", "rank 1: no batch within 4 s")), marks=pytest.mark.full
        ),
    ],
)
def test_a_fault_ends_both_ranks_with_its_text_and_leaves_nothing(
    fault: str, timeout: float, says: tuple[str, str], tmp_path: Path
) -> None:
    with running(train, tmp_path, fault=fault, timeout=timeout) as (_, all_ended):
        ended = all_ended()
    for end, text in zip(ended, says, strict=True):
        assert end.code not in (0, -signal.SIGKILL)
        assert re.search(f"Error: {text}", end.output), end.output
    if fault == "an exception":
        assert all("in __getitem__" in end.output for end in ended)


def leave_after_one_batch(folder: str) -> None:
    dist.init_process_group("gloo")
    for _ in ODBLoader(ManyDocuments(), pad, l_max=500, buffer_size=50, num_workers=2, start_method="fork"):
        break
    dist.destroy_process_group()


def test_leaving_after_one_batch_leaves_nothing(tmp_path: Path) -> None:
    with running(leave_after_one_batch, tmp_path) as (_, all_ended):
        assert [(end.code, end.output) for end in all_ended()] == [(0, "")] * 2


# ---- signals


def loop(folder: str) -> None:
    """A plain loop, in which SIGTERM does what it does to any program."""
    dist.init_process_group("gloo")
    for number, _ in enumerate(ODBLoader(ManyDocuments(), pad, l_max=500, buffer_size=50, num_workers=2)):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
        if number == 3:
            (Path(folder) / f"training{dist.get_rank()}").touch()


@pytest.mark.parametrize("target", [0, 1])
def test_sigterm_to_one_rank_of_a_plain_loop_ends_both(target: int, tmp_path: Path) -> None:
    with running(loop, tmp_path) as (processes, all_ended):
        processes[target].send_signal(signal.SIGTERM)
        ended = all_ended()
    assert ended[target].code == -signal.SIGTERM
    assert ended[1 - target].code not in (0, -signal.SIGKILL)


def test_what_a_launcher_does_to_end_a_run_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM to all ranks and, a while later, SIGKILL. Whether Lightning ends by the first is its own affair."""
    with running(train, tmp_path, fault="", timeout=100) as (processes, all_ended):
        for process in processes:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.05)
        for process in processes:
            process.kill()
        all_ended()


CTRL_C = """
from tests.odb.test_faults import train
if __name__ == "__main__":
    train("", {folder!r}, 100)
"""


def test_ctrl_c_ends_all_that_a_terminal_started(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CTRL_C.format(folder=str(tmp_path)))
    with (tmp_path / "log").open("w+") as log:
        process = start([sys.executable, str(script)], log, {"PYTHONPATH": str(Path.cwd())})
        try:
            deadline = time.monotonic() + 2 * LIMIT_S
            while not all((tmp_path / f"training{rank}").exists() for rank in range(2)):
                log.seek(0)
                assert process.poll() is None, log.read()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(LIMIT_S) == 1
            assert session_ends(process)
        finally:
            wait_all([process], 0)
        log.seek(0)
        assert "Detected KeyboardInterrupt" in log.read()


# ---- limits and order


def under_a_low_limit_of_files() -> Any:
    dist.init_process_group("gloo")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    seen = 0
    for batch in ODBLoader(FiveTensors(2200), stack, l_max=400, num_workers=2, buffer_size=1024):
        seen += len(batch["a"])
    dist.destroy_process_group()
    return seen


class FiveTensors(Documents):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.full((4,), index) for name in "abcde"} | {"length": torch.tensor(4)}


def stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def test_a_thousand_samples_of_five_tensors_need_few_files_on_two_ranks(tmp_path: Path) -> None:
    assert sum(run_ranks(under_a_low_limit_of_files, 2, tmp_path)) == 2200


def built_before_the_group(iterated: str) -> Any:
    loader = ODBLoader(Documents(40), pad, l_max=500, num_workers=1)
    refused = ""
    if iterated == "before":
        try:
            next(iter(loader))
        except ODBError as error:
            refused = str(error)
    dist.init_process_group("gloo")
    seen = [i for batch in loader for i in loader.info.indices]
    dist.destroy_process_group()
    return [refused, seen]


@pytest.mark.parametrize("iterated", ["before", "after"])
def test_a_loader_built_before_the_group_is_no_loader_of_lonely_ranks(iterated: str, tmp_path: Path) -> None:
    ranks = run_ranks(built_before_the_group, 2, tmp_path, iterated=iterated)
    for refused, _ in ranks:
        assert ("there is no process group" in refused) == (iterated == "before")
    assert sorted(i for _, seen in ranks for i in seen) == list(range(40))
