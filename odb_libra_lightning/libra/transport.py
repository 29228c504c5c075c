"""What carries rows between the workers of a pool: a process group, or threads of one process.

The executor knows `Transport` alone, so that the same code runs over NCCL, over gloo, and with many workers in one
process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_process_group_store

# How often a worker looks who else has come to a roll call.
_LOOK_S = 0.05
# Facts that were agreed upon and are not asked for again: several plans a step, where a model alternates windows.
_REMEMBERED = 32


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Return when the output may be used; on CUDA, when work queued from now on may use it."""


class Transport(Protocol):
    """Workers that exchange rows. All call the same operations in the same order."""

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""

    @property
    def size(self) -> int:
        """Number of workers."""

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:
        """Begin to send each worker its part of `input` and to receive each worker's part into `output`.

        Both are contiguous and cut along dimension 0, in order of the workers; parts may be empty. Before the handle
        has been waited for, `output` may be neither read nor written and `input` not written; after it, `input` is the
        caller's again.
        """


class LocalTransport:
    """A worker alone."""

    rank, size = 0, 1

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:
        """Its own rows; see `Transport.all_to_all`."""
        _check(self, output, input, output_splits, input_splits)
        output.copy_(input)
        return _Done()


class GroupTransport:
    """A process group of `torch.distributed`.

    A transfer that fails makes `wait()` raise one sentence that names the workers that are missing. On gloo, the end of
    a process breaks its connections at once, and a process that hangs runs into the time limit; whoever sees either
    closes its own connections, so that all others come to see it too. Each then answers a roll call in the group's
    store, and those that do not answer are the ones to name. After a failure the group is of no further use.

    On NCCL `wait()` orders streams and does not block the host. There NCCL's watchdog ends the process after the
    group's timeout, and says in which collective.

    Attributes:
        group: the process group.
        rank: number of this worker in it.
        size: number of workers.

    Args:
        group: the group; None: all processes.
        timeout: seconds that a transfer may take, the time included that other workers compute before they come to it;
            None: the group's timeout. Not on NCCL, where that of the group is the only one.
        roll_call_s: seconds that a failing worker gives the others to answer. One that computes for longer, and so
            does not see that the transfer failed, is named as missing.

    Raises:
        ValueError: a timeout of its own on NCCL, or times that are not positive.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None, roll_call_s: float = 5.0
    ) -> None:
        for name, value in (("timeout", timeout), ("roll_call_s", roll_call_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: expected seconds, more than 0")
        if timeout is not None and dist.get_backend(group) == "nccl":
            raise ValueError(f"timeout={timeout:g}: on NCCL only that of the group counts; give it where it is made")
        self.group = dist.group.WORLD if group is None else group
        self._timeout = timeout
        self._roll_call_s = roll_call_s
        self._failure: str | None = None
        self._agreed: OrderedDict[str, None] = OrderedDict()
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:
        """See `Transport.all_to_all`.

        Raises:
            RuntimeError: a worker that does not answer; also from `wait()`.
        """
        _check(self, output, input, output_splits, input_splits)
        if self._failure is not None:
            raise RuntimeError(self._failure)
        splits = list(output_splits), list(input_splits)
        begin = time.monotonic()
        try:
            if self._timeout is None:
                work = dist.all_to_all_single(output, input, *splits, group=self.group, async_op=True)
            else:
                options = dist.AllToAllOptions()
                options.asyncOp = True
                options.timeout = timedelta(seconds=self._timeout)
                assert self.group is not None
                work = self.group.alltoall_base(output, input, *splits, options)
        except RuntimeError as error:
            raise self._failed(begin, error) from error
        return _GroupHandle(transport=self, work=work, begin=begin)

    def agree(self, facts: str) -> None:
        """Make sure that all workers come with the same facts, before anything that depends on them is sent.

        Each compares with the worker before it, through the group's store: where not all are the same, one at least
        raises. Facts that this transport agreed upon lately are not asked for again. The device does not wait, only the
        host.

        Raises:
            ValueError: another worker has other facts.
            RuntimeError: it does not answer.
        """
        if facts in self._agreed:
            self._agreed.move_to_end(facts)
            return
        if self._failure is not None:
            raise RuntimeError(self._failure)
        assert self.group is not None
        store = PrefixStore("libra/agree", _get_process_group_store(self.group))
        before = (self.rank - 1) % self.size
        limit = _time_limit(self.group) if self._timeout is None else timedelta(seconds=self._timeout)
        begin = time.monotonic()
        try:
            # Counted in the store, for there may be several transports of one group.
            number = store.add(f"calls/{self.rank}", 1)
            store.set(f"{number}/{self.rank}", facts)
            store.wait([f"{number}/{before}"], limit)
            others = store.get(f"{number}/{before}").decode()
            store.delete_key(f"{number}/{before}")  # nobody else reads it
        except RuntimeError as error:
            raise self._failed(begin, error) from error
        if others != facts:
            raise ValueError(
                f"worker {self.rank} of {self.size} comes with [{facts}] and worker {before} with [{others}]: all "
                "workers call the same attentions in the same order, with the same plan, dtype and options"
            )
        self._agreed[facts] = None
        if len(self._agreed) > _REMEMBERED:
            self._agreed.popitem(last=False)

    def _failed(self, begin: float, cause: RuntimeError) -> RuntimeError:
        """What to raise for a transfer that began at `begin`; the first time after a roll call."""
        if self._failure is None:
            waited = time.monotonic() - begin
            assert self.group is not None
            ranks = dist.get_process_group_ranks(self.group)
            store = PrefixStore("libra/roll_call", _get_process_group_store(self.group))
            absent = _RollCall(store, self.rank, self.size).absent(within=self._roll_call_s)
            me = f"worker {self.rank} of {self.size} (global rank {ranks[self.rank]})"
            if self.rank in absent:
                self._failure = (
                    f"{me}: the transfer failed after {waited:.1f} s and the group's store does not answer: "
                    "global rank 0 or the launcher on its host, one of which holds it, has ended or hangs; its own "
                    "output says why"
                )
            elif absent:
                names = " and ".join(f"worker {worker} (global rank {ranks[worker]})" for worker in absent)
                self._failure = (
                    f"{me}: {names} did not answer, the transfer failed after {waited:.1f} s: the process has ended or "
                    "hangs; the end of its own output says why, or where it still runs its stack does (py-spy dump)"
                )
            else:
                self._failure = (
                    f"{me}: the transfer failed after {waited:.1f} s though all workers answer: they have come to "
                    "different transfers or send what others do not expect, one came later than the time limit, or "
                    f"they cannot reach one another (on several networks set GLOO_SOCKET_IFNAME): {cause}"
                )
        return RuntimeError(self._failure)


@dataclass(frozen=True, kw_only=True)
class _GroupHandle:
    transport: GroupTransport
    work: dist.Work
    begin: float

    def wait(self) -> None:
        """See `Handle.wait`."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.transport._failed(self.begin, error) from error


@dataclass(frozen=True)
class _RollCall:
    """Workers that have seen a failure find out who else has."""

    store: Store
    rank: int
    size: int
    _answered: set[int] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)

    def absent(self, *, within: float) -> list[int]:
        """Workers that do not answer; this one is among them if the store does not answer."""
        # In a thread, since a store whose host is stopped keeps a call for ever.
        thread = threading.Thread(target=self._call, name="odb-libra-roll-call", daemon=True)
        thread.start()
        thread.join(within)
        self._over.set()
        thread.join(4 * _LOOK_S)
        return sorted(set(range(self.size)) - self._answered)

    def _call(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended; who has answered by then, has
            self.store.set(str(self.rank), "here")
            while len(self._answered) < self.size and not self._over.is_set():
                missing = set(range(self.size)) - self._answered
                self._answered.update(worker for worker in missing if self.store.check([str(worker)]))
                self._over.wait(_LOOK_S)


def _time_limit(group: dist.ProcessGroup) -> timedelta:
    """The timeout that a group was made with."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            limit: timedelta = group._get_backend(torch.device(device)).options._timeout
            return limit
    return dist.distributed_c10d.default_pg_timeout


def agree(transport: Transport, *facts: object) -> None:
    """`GroupTransport.agree` where workers are processes, which may differ."""
    if isinstance(transport, GroupTransport):
        transport.agree(" ".join(map(str, facts)))


class _Done:
    def wait(self) -> None:
        """Nothing was sent."""


def _check(
    transport: Transport,
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> None:
    """What a backend would refuse on this worker alone, while the others wait for it."""
    for name, rows, splits in (("output", output, output_splits), ("input", input, input_splits)):
        assert rows.is_contiguous(), f"{name} is not contiguous"
        assert len(splits) == transport.size, f"{len(splits)} splits of {name} for {transport.size} workers"
        assert sum(splits) == len(rows), f"splits of {name} add up to {sum(splits)}, it has {len(rows)} rows"
    assert output.dtype == input.dtype, f"output is {output.dtype}, input {input.dtype}"
