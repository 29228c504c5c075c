"""How the collate processes of all ranks find one another. The one place that reads the launcher's variables."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from odb_libra_lightning.odb.errors import ODBError, PeerLostError
from odb_libra_lightning.odb.transport import GlooTransport


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """Where a control group forms: what a process needs to join it.

    Attributes:
        host: host of the key-value store.
        port: its port.
        name: name of the group within the store, used once.
        rank: the rank that joins.
        world_size: number of ranks.
        timeout: seconds to wait for the others.
    """

    host: str
    port: int
    name: str
    rank: int
    world_size: int
    timeout: float

    def join(self) -> GlooTransport:
        """Join the group; returns when all ranks have.

        Raises:
            PeerLostError: if the store cannot be reached or the group does not form in time.
        """
        try:
            store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank}: the control store of rank 0 at {self.host}:{self.port} cannot be reached ({error})"
            ) from error
        named = PrefixStore(self.name, store)
        return GlooTransport(named, rank=self.rank, world_size=self.world_size, timeout=self.timeout)


class ControlStore:
    """A key-value store that rank 0 holds for one loader, and its address on the others.

    The address travels through the store of the trainer's process group, so nothing has to be configured, and
    no collective of the trainer's group is called.

    Args:
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds to wait for rank 0.

    Raises:
        ODBError: if there is no process group.
        PeerLostError: if rank 0 does not publish the address in time.
    """

    def __init__(self, *, rank: int, world_size: int, timeout: float) -> None:
        if not dist.is_initialized():
            raise ODBError(
                f"rank {rank} of {world_size}: the loader was iterated before the process group exists; "
                "iterate it after torch.distributed.init_process_group, or let the trainer do so"
            )
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._groups = 0
        trainer_store = distributed_c10d._get_default_store()
        number = trainer_store.add(f"odb/loaders/{rank}", 1)  # loaders are built in the same order on all ranks
        key = f"odb/control_store/{number}"
        if rank == 0:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
            trainer_store.set(key, json.dumps([host, self._server.port]))
        try:
            trainer_store.wait([key], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise PeerLostError(f"rank {rank}: rank 0 did not open its loader within {timeout:g} s") from error
        self._host, self._port = json.loads(trainer_store.get(key))

    def next_group(self) -> ControlGroup:
        """A group of which no process is a member yet."""
        self._groups += 1
        return ControlGroup(
            host=self._host,
            port=self._port,
            name=f"collate/{self._groups}",
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )


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
