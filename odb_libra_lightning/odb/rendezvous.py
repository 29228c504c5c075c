"""How the collate processes of all ranks find one another. The one place that reads the launcher's variables."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import util
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from odb_libra_lightning.odb.errors import ODBError, PeerLostError
from odb_libra_lightning.odb.roll_call import RollCall
from odb_libra_lightning.odb.transport import GlooTransport, StoreTransport

TransportName: TypeAlias = Literal["gloo", "store"]

# How much longer a replica waits for its leader than the leader for other ranks, whose error then comes first.
_GRACE_S = 15.0
# How long the process that holds the store waits at its end for others that still read from it.
_LINGER_S = 3.0
# An address outside, kept for documentation (RFC 5737).
_ANYWHERE = "192.0.2.1"


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """Where a control group forms: what a process needs to join it.

    Attributes:
        host: host of the key-value store.
        port: its port.
        name: name of the group within the store, used once.
        rank: number within the group of the process that joins.
        names: how to call each process of the group in an error, such as "rank 1".
        address: address at which others reach the process.
        timeout: seconds to wait for the others.
        transport: what carries the messages.
    """

    host: str
    port: int
    name: str
    rank: int
    names: tuple[str, ...]
    address: str
    timeout: float
    transport: TransportName = "gloo"

    def join(self) -> GlooTransport | StoreTransport:
        """Join the group; returns when all ranks have.

        Raises:
            PeerLostError: if the store cannot be reached or the group does not form in time.
        """
        roll = RollCall(self._connect(), rank=self.rank, names=self.names, address=self.address, timeout=self.timeout)
        if self.transport == "store":
            return StoreTransport(roll, self._connect())
        return GlooTransport(roll, address=self.address)

    def _connect(self) -> PrefixStore:
        try:
            store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise PeerLostError(
                f"{self.names[self.rank]}: the control store of rank 0 at {self.host}:{self.port} cannot be reached "
                f"({error})"
            ) from error
        return PrefixStore(self.name, store)


class ReplicaChannel:
    """From the process that loads for a data-parallel rank to the others of that rank.

    Args:
        group: the processes that share the rank, ascending; the first of them loads.

    Raises:
        PeerLostError: if they do not all come in time.
    """

    def __init__(self, group: ControlGroup) -> None:
        self._transport = group.join()

    def broadcast(self, payload: bytes | None) -> bytes:
        """The bytes of the leader, on every member; `payload` is read on the leader alone.

        Raises:
            PeerLostError: if a member does not answer in time; it names the member.
        """
        return self._transport.broadcast(payload, 0)


@dataclass(frozen=True)
class _Process:
    """What each process tells all others, by global rank."""

    rank: int
    world_size: int
    address: str


class ControlStore:
    """A key-value store that global rank 0 holds for one loader, and its address on the others.

    The address travels through the store of the trainer's process group, so nothing has to be configured, and
    no collective of the trainer's group is called.

    Several processes may share one data-parallel rank, as in context or tensor parallelism. The lowest of them in
    global rank, the leader, loads for all; only leaders form control groups.

    Args:
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks; the process group has so many processes or a multiple.
        timeout: seconds to wait for the others.
        transport: what carries the messages of control groups.

    Attributes:
        members: global ranks of the processes that share this data-parallel rank, ascending.

    Raises:
        ODBError: if there is no process group, or its processes do not make `world_size` ranks of equal size.
        PeerLostError: if other processes do not build their loader in time; it names them.
    """

    def __init__(self, *, rank: int, world_size: int, timeout: float, transport: TransportName = "gloo") -> None:
        if not dist.is_initialized():
            raise ODBError(
                f"rank {rank} of {world_size}: the loader was iterated before the process group exists; "
                "iterate it after torch.distributed.init_process_group, or let the trainer do so"
            )
        self._timeout = timeout
        self._transport = transport
        self._groups = 0
        self._channels = 0
        self._me = dist.get_rank()
        trainer_store: Any = distributed_c10d._get_default_store()
        # Loaders are built in the same order in all processes.
        self._name = f"odb/loaders/{trainer_store.add(f'odb/loaders_of/{self._me}', 1)}"
        processes = self._introduce(trainer_store, rank, world_size)
        ranks = _grouped(processes)
        self.members = ranks[rank]
        self._leaders = [members[0] for members in ranks]
        self._rank = rank
        self._address = outer_address([process.address for process in processes], self._me)
        key = f"{self._name}/store"
        if self._me == 0:
            wait = timedelta(seconds=timeout)
            self._server = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=wait)
            trainer_store.set(key, json.dumps([self._address, self._server.port]))
        try:
            trainer_store.wait([key], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise PeerLostError(f"rank {rank}: rank 0 did not open its loader within {timeout:g} s") from error
        self._host, self._port = json.loads(trainer_store.get(key))
        # After the collate processes (priority 10), which are the ones that still read.
        server = self._server if self._me == 0 else None
        self._leave = util.Finalize(
            self, _leave, args=(self._host, self._port, server, len(processes), transport == "store"), exitpriority=5
        )

    def close(self) -> None:
        """Leave the store. Where exchanges go through it, the process that holds it waits a little for the others."""
        self._leave()

    @property
    def leads(self) -> bool:
        """Whether this process loads for its data-parallel rank."""
        return self.members[0] == self._me

    def next_group(self) -> ControlGroup | None:
        """A group of which no process is a member yet, for all leaders; None where there is only one.

        Raises:
            ODBError: if this process does not lead.
        """
        if not self.leads:
            raise ODBError(f"process {self._me} is no leader: process {self.members[0]} loads for rank {self._rank}")
        if len(self._leaders) == 1:
            return None
        self._groups += 1
        return ControlGroup(
            host=self._host,
            port=self._port,
            name=f"collate/{self._groups}",
            rank=self._rank,
            names=tuple(f"rank {rank}" for rank in range(len(self._leaders))),
            address=self._address,
            timeout=self._timeout,
            transport=self._transport,
        )

    def replica_channel(self) -> ReplicaChannel | None:
        """A new channel to the processes of this data-parallel rank, once all of them have asked for it.

        Returns:
            None where this process is alone.
        """
        if len(self.members) == 1:
            return None
        self._channels += 1
        group = ControlGroup(
            host=self._host,
            port=self._port,
            name=f"replicas/{self._rank}/{self._channels}",
            rank=self.members.index(self._me),
            names=tuple(f"process {member} (of rank {self._rank})" for member in self.members),
            address=self._address,
            timeout=self._timeout + _GRACE_S,
        )
        return ReplicaChannel(group)

    def _introduce(self, trainer_store: Any, rank: int, world_size: int) -> list[_Process]:
        """Tell all processes of this one, and learn of them."""
        address = address_towards(_store_host(trainer_store))
        keys = [f"{self._name}/process/{process}" for process in range(dist.get_world_size())]
        trainer_store.set(keys[self._me], json.dumps([rank, world_size, address]))
        try:
            trainer_store.wait(keys, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            absent = [process for process, key in enumerate(keys) if not trainer_store.check([key])]
            raise PeerLostError(
                f"rank {rank}: no loader was iterated within {self._timeout:g} s on global rank "
                f"{', '.join(map(str, absent))}; do all ranks train with the same loader?"
            ) from error
        return [_Process(*json.loads(value)) for value in trainer_store.multi_get(keys)]


def check_agreement(facts: dict[str, Any], *, what: str, timeout: float) -> None:
    """Check that all processes of the trainer's group say the same, through its store; no collective is called.

    Args:
        facts: what they must agree on, plain JSON values by name. All processes call this in the same order.
        what: what the facts are of, for the error.
        timeout: seconds to wait for the others.

    Raises:
        ODBError: on every process, if one says something else; it names the fact and the rank.
        PeerLostError: if other processes do not come in time; it names them.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store: Any = distributed_c10d._get_default_store()
    me, names = dist.get_rank(), sorted(facts)
    number = store.add(f"odb/agreements_of/{me}", 1)
    keys = [f"odb/agreements/{number}/{process}" for process in range(dist.get_world_size())]
    store.set(keys[me], json.dumps(facts, sort_keys=True))
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = [process for process, key in enumerate(keys) if not store.check([key])]
        raise PeerLostError(
            f"global rank {me}: {what} was not opened within {timeout:g} s on global rank "
            f"{', '.join(map(str, absent))}; do all ranks train on the same?"
        ) from error
    said = [json.loads(value) for value in store.multi_get(keys)]
    for name in names:
        other = next((process for process, each in enumerate(said) if each.get(name) != said[0].get(name)), None)
        if other is not None:
            raise ODBError(
                f"{what} must be the same on every rank, and {name} is {said[0].get(name)} on global rank 0 and "
                f"{said[other].get(name)} on global rank {other}"
            )


def _leave(host: str, port: int, server: TCPStore | None, processes: int, read: bool) -> None:
    """Say that this process reads no more; and, holding the store, wait until all have said so."""
    if not read:
        return
    with contextlib.suppress(RuntimeError, OSError):  # the others, or the store, may be gone: then nobody reads
        if server is None:
            socket.create_connection((host, port), 1).close()  # a store's client would try for long, and loudly
        store = server or TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_LINGER_S))
        left = store.add("left", 1)
        deadline = time.monotonic() + _LINGER_S
        while server is not None and left < processes and time.monotonic() < deadline:
            time.sleep(0.02)
            left = store.add("left", 0)


def _grouped(processes: Sequence[_Process]) -> list[tuple[int, ...]]:
    """Global ranks of each data-parallel rank.

    Raises:
        ODBError: if there are not equally many of each.
    """
    world_size = processes[0].world_size
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    for number, process in enumerate(processes):
        if process.world_size != world_size or not 0 <= process.rank < world_size:
            raise ODBError(
                f"global rank {number} loads as rank {process.rank} of {process.world_size}, global rank 0 as rank "
                f"{processes[0].rank} of {world_size}: give the same world_size, and a rank below it, to each loader"
            )
        ranks[process.rank].append(number)
    sizes = [len(members) for members in ranks]
    if len(set(sizes)) != 1:
        raise ODBError(
            f"{len(processes)} processes do not make {world_size} data-parallel ranks of equal size, they make sizes "
            f"{sizes} (by rank): give each loader its data-parallel rank and world size"
        )
    return [tuple(members) for members in ranks]


def _store_host(store: Any) -> str:
    """A host that all processes reach, on which the trainer's store runs or once ran; empty if unknown."""
    while not isinstance(store, TCPStore) and hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR", "")


def address_towards(host: str) -> str:
    """This host's address on the network interface from which it reaches `host`; nothing is sent.

    Args:
        host: name or address; if empty, the interface that leads out is taken.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host or _ANYWHERE, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def outer_address(addresses: Sequence[str], me: int) -> str:
    """Address at which all other processes reach this one, given those towards one host.

    Processes on that very host find a loopback address (on Debian a host's name is 127.0.1.1), which serves only
    if all are there. Otherwise it is their address towards some process elsewhere.
    """
    if not _is_loopback(addresses[me]):
        return addresses[me]
    elsewhere = [address for address in addresses if not _is_loopback(address)]
    return address_towards(elsewhere[0]) if elsewhere else addresses[me]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def current_rank() -> tuple[int, int]:
    """Rank and world size of this process, `(0, 1)` outside distributed training.

    Raises:
        ODBError: if the process was launched as one of several whose process group does not exist yet.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1:
        raise ODBError(
            f"WORLD_SIZE is {launched} but there is no process group, so each rank would train on all data; "
            "iterate the loader after torch.distributed.init_process_group, or let the trainer do so"
        )
    return 0, 1
