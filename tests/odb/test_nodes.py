"""Ranks on two hosts: network namespaces joined by a cable, in which a host's own name is 127.0.1.1, as on Debian."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist

from odb_libra_lightning import ODBDataModule, ODBLoader
from odb_libra_lightning.odb.rendezvous import ControlStore
from tests.launch import start, wait_all
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, identities, pad

SIZE = 61
SETTINGS: dict[str, Any] = {"l_max": 600, "num_workers": 1, "buffer_size": 20, "timeout": 60}
CABLE = "odb0"  # network interface of each host
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Node:
    """A host: the namespace it is made of, and its address on the cable."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *arguments]


def ip(*arguments: str) -> None:
    ended = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if ended.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {ended.stderr.strip()}")


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two hosts, which are gone afterwards with all that runs in them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two hosts are made of network namespaces, which takes root and the command ip (iproute2)")
    made = [Node(f"odb{os.getpid()}{letter}", address) for letter, address in zip("ab", ADDRESSES, strict=True)]
    with contextlib.ExitStack() as cleaning:
        try:
            for node in made:
                cleaning.callback(remove, node)
                ip("netns", "add", node.name)
                folder = Path("/etc/netns", node.name)  # what `ip netns exec` shows as /etc
                folder.mkdir(parents=True)
                own = {"127.0.0.1": "localhost", "127.0.1.1": f"{node.name} {os.uname().nodename}"}
                others = {other.address: other.name for other in made if other is not node}
                folder.joinpath("hosts").write_text("".join(f"{a} {n}\n" for a, n in {**own, **others}.items()))
            ip("link", "add", CABLE, "netns", made[0].name, "type", "veth", "peer", CABLE, "netns", made[1].name)
            for node in made:
                ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", CABLE)
                ip("-n", node.name, "link", "set", CABLE, "up")
                ip("-n", node.name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here ({error})")
        yield made


def remove(node: Node) -> None:
    pids = subprocess.run(["ip", "netns", "pids", node.name], capture_output=True, text=True, timeout=20).stdout
    for pid in pids.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", node.name], capture_output=True, timeout=20)
    shutil.rmtree(Path("/etc/netns", node.name), ignore_errors=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()  # fails where others use it


def write(folder: str, seen: list[int]) -> None:
    """What this rank saw, and where its control groups form."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = ControlStore(rank=rank, world_size=world_size, timeout=60, transport="store")
    group = store.next_group()
    assert group is not None
    store_carries = group.join().broadcast(b"hello" if rank == 1 else None, 1) == b"hello"
    dist.barrier()  # rank 0 holds the store
    result = {"seen": seen, "host": group.host, "address": group.address, "store_carries": store_carries}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))


def iterate(folder: str) -> None:
    dist.init_process_group("gloo")
    del os.environ["GLOO_SOCKET_IFNAME"]  # which only the trainer's group needs
    loader = ODBLoader(Documents(SIZE), pad, **SETTINGS)
    write(folder, [i for batch in loader for i in identities(batch)])
    loader.close()
    dist.destroy_process_group()


class Alone(L.Callback):
    """Once the trainer's group exists, nothing says any more which interface to take."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        del os.environ["GLOO_SOCKET_IFNAME"]


class WritesWhatItSaw(BigramModel):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        write(self.folder, [i for batch in self.seen for i in batch])


def train(folder: str) -> None:
    trainer = quiet_trainer(num_nodes=2, devices=1, strategy="ddp", max_epochs=1, callbacks=[Alone()])
    assert type(trainer.strategy.cluster_environment).__name__ == "SLURMEnvironment"
    trainer.fit(WritesWhatItSaw(folder), datamodule=ODBDataModule(Documents(SIZE), pad, **SETTINGS))
    dist.destroy_process_group()


def run_and_check(commands: list[list[str]], variables: list[dict[str, str]], ranks: int, folder: Path) -> None:
    """All samples were seen, and ranks met at the cable's addresses; `ranks` on each host."""
    with (folder / "log").open("w+") as log:
        processes = [
            start(command, log, {"GLOO_SOCKET_IFNAME": CABLE, **own})
            for command, own in zip(commands, variables, strict=True)
        ]
        wait_all(processes, 120)
        log.seek(0)
        assert [process.returncode for process in processes] == [0, 0], log.read()
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2 * ranks)]
    seen = Counter(i for result in results for i in result["seen"])
    assert set(seen) == set(range(SIZE))
    assert seen.total() == -(-SIZE // (2 * ranks)) * 2 * ranks
    assert {result["host"] for result in results} == {ADDRESSES[0]}
    assert [result["address"] for result in results] == [address for address in ADDRESSES for _ in range(ranks)]
    assert all(result["store_carries"] for result in results)


@pytest.mark.full
@pytest.mark.parametrize(("rendezvous", "ranks"), [("static", 1), ("c10d", 2)])
def test_ranks_under_torchrun_meet_over_the_network(
    rendezvous: str, ranks: int, nodes: list[Node], tmp_path: Path
) -> None:
    commands = []
    for number, node in enumerate(nodes):
        where = {
            "static": [f"--node-rank={number}", f"--master-addr={nodes[0].name}", "--master-port=29500"],
            "c10d": [
                f"--node-rank={number}",
                "--rdzv-backend=c10d",
                "--rdzv-id=test",
                f"--rdzv-endpoint={nodes[0].name}:29500",
                f"--local-addr={node.address}",
            ],
        }[rendezvous]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks}", *where]
        commands.append(node.command(*torchrun, "-m", "tests.odb.test_nodes", "iterate", str(tmp_path)))
    run_and_check(commands, [{}, {}], ranks, tmp_path)


@pytest.mark.full
def test_ranks_under_slurm_train_over_the_network(nodes: list[Node], tmp_path: Path) -> None:
    commands, variables = [], []
    for number, node in enumerate(nodes):
        commands.append(node.command(sys.executable, "-m", "tests.odb.test_nodes", "train", str(tmp_path)))
        slurm = {
            "JOB_ID": "1234",
            "JOB_NAME": "test",
            "NTASKS": "2",
            "NTASKS_PER_NODE": "1",
            "NNODES": "2",
            "NODELIST": ",".join(n.name for n in nodes),
            "PROCID": str(number),
            "LOCALID": "0",
            "NODEID": str(number),
        }
        variables.append({f"SLURM_{name}": value for name, value in slurm.items()})
    run_and_check(commands, variables, 1, tmp_path)


if __name__ == "__main__":
    {"iterate": iterate, "train": train}[sys.argv[1]](sys.argv[2])
