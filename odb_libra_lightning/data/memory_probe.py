"""Measuring the peak memory of training steps on batches of chosen sizes.

The steps are a Trainer's own, so precision, clipping and the optimizer's states are in what is measured. On a GPU the
peak is what PyTorch's allocator held at most; on the CPU it is the most memory of the process that was resident,
which Linux counts and lets one reset. The C library is asked to map each tensor by itself meanwhile: what it keeps of
freed memory would otherwise be as large as what is measured, and differ from run to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from odb_libra_lightning.data.memory_model import MemoryModel, MemoryPoint, fit_memory

MakeBatch = Callable[[int, int], Any]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_WARM_UP = 2  # steps after which the optimizer has its states and the gradients their memory


def causal_lm_batch(samples: int, length: int, *, vocab_size: int = 2) -> dict[str, torch.Tensor]:
    """Random `input_ids`, with `attention_mask` and `labels` as a causal language model takes them.

    Args:
        samples: `n`.
        length: `l`, tokens.
        vocab_size: ids are drawn below it; memory seldom depends on which, and every model has two.

    Returns:
        Three int64 tensors `[n, l]`; all positions are tokens and bear loss.
    """
    ids = torch.randint(0, vocab_size, (samples, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def probe_points(longest: int) -> list[tuple[int, int]]:
    """Sizes of batches, as samples and length, from which a fit can tell all terms apart.

    One and two samples of a quarter, half and the whole of `longest`, tokens, at least 8.

    Raises:
        ValueError: `longest` is below 8.
    """
    if longest < 8:
        raise ValueError(f"longest={longest}: take at least 8 tokens, and rather a thousand")
    return [(samples, length) for length in (longest // 4, longest // 2, longest) for samples in (1, 2)]


def measure_memory(
    module: L.LightningModule,
    points: Sequence[tuple[int, int]],
    *,
    make_batch: MakeBatch = causal_lm_batch,
    **trainer_options: Any,
) -> list[MemoryPoint]:
    """Peak memory of one training step on each of these batches, in one process.

    It trains the module on random batches: give it one that you do not need afterwards.

    Example:
        >>> points = measure_memory(module, probe_points(4096), precision="bf16-mixed")  # doctest: +SKIP
        >>> l_max, quadratic_length = fit_memory(points).budget(70e9)  # doctest: +SKIP

    Args:
        module: what is to be trained.
        points: samples and length of each batch, both at least 1.
        make_batch: a batch of so many samples of so many tokens, on the CPU.
        **trainer_options: for the Trainer, such as `accelerator`, `precision`, `gradient_clip_val`.

    Raises:
        ValueError: no points, or one below 1.
        RuntimeError: a batch did not fit, with its size; or this machine does not tell a peak.
    """
    if not points or any(samples < 1 or length < 1 for samples, length in points):
        raise ValueError(f"points={list(points)}: give at least one, of at least 1 sample and 1 token")
    smallest = min(points, key=lambda point: point[0] * point[1])
    batches = _Batches([smallest] * _WARM_UP + list(points), make_batch)
    peaks = _Peaks()
    options: dict[str, Any] = {"devices": 1, "max_epochs": 1, "limit_val_batches": 0, "accumulate_grad_batches": 1}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {**quiet, "enable_model_summary": False, **trainer_options}
    trainer = L.Trainer(**{**options, "callbacks": [*(options.get("callbacks") or []), peaks]})
    on_cpu = trainer.strategy.root_device.type == "cpu"
    try:
        with _tensors_mapped_alone() if on_cpu else contextlib.nullcontext():
            trainer.fit(module, train_dataloaders=batches)
    except torch.OutOfMemoryError as error:
        samples, length = batches.sizes[len(peaks.bytes)]
        raise RuntimeError(
            f"{samples} samples of {length} tokens did not fit into memory: measure smaller batches"
        ) from error
    measured = peaks.bytes[_WARM_UP:]
    return [MemoryPoint(samples, length, peak) for (samples, length), peak in zip(points, measured, strict=True)]


def calibrate_memory(
    module: L.LightningModule,
    longest: int,
    *,
    make_batch: MakeBatch = causal_lm_batch,
    **trainer_options: Any,
) -> MemoryModel:
    """Measure at `probe_points(longest)`, and fit; arguments and errors as of `measure_memory`."""
    points = measure_memory(module, probe_points(longest), make_batch=make_batch, **trainer_options)
    return fit_memory(points)


class _Batches:
    """One batch of each size, in order; each is made when it is asked for."""

    def __init__(self, sizes: Sequence[tuple[int, int]], make_batch: MakeBatch) -> None:
        self.sizes = sizes
        self._make_batch = make_batch

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Any]:
        return (self._make_batch(samples, length) for samples, length in self.sizes)


class _Peaks(L.Callback):
    """Peak memory of each training step, bytes, from the batch's arrival on the device to the optimizer's step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        gc.collect()
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type == "cpu":
            reset_resident_peak()
        else:
            raise RuntimeError(f"peak memory of a step is measured on cuda and cpu, not on {device.type}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        device = trainer.strategy.root_device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_peak()
        self.bytes.append(peak)


def reset_resident_peak() -> None:
    """Give freed memory back to the system, and begin to count the peak of this process anew.

    `getrusage` cannot do this: its peak never falls, and a child process may begin with that of its parent.

    Raises:
        RuntimeError: not on Linux, or it is forbidden here.
    """
    if hasattr(_libc(), "malloc_trim"):  # another C library may keep what was freed resident, and it counts
        _libc().malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise RuntimeError(
            f"the peak of resident memory cannot be reset here ({error}): it takes Linux with /proc, or a GPU"
        ) from error


def resident_peak() -> int:
    """Most resident memory of this process since the last `reset_resident_peak`, bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this kernel does not count the peak of resident memory")


@contextlib.contextmanager
def _tensors_mapped_alone() -> Iterator[None]:
    """Have GNU's malloc return each tensor of 64 KiB or more to the system as soon as it is freed.

    Afterwards its thresholds are those that it reaches by itself in a process with large tensors.
    """
    if not hasattr(_libc(), "mallopt"):
        yield
        return
    _libc().mallopt(_M_MMAP_THRESHOLD, 2**16)
    try:
        yield
    finally:
        _libc().mallopt(_M_MMAP_THRESHOLD, 2**25)
        _libc().mallopt(_M_TRIM_THRESHOLD, 2**26)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
