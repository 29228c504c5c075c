"""A clean exit for processes that train over Gloo."""

from __future__ import annotations

import atexit
from multiprocessing import util

import torch.distributed as dist


def destroy_gloo_at_exit() -> None:
    """Destroy a Gloo default group before the interpreter ends.

    A process that exits with one alive aborts now and then, after its work is done and with a bad exit code.
    Lightning destroys NCCL groups only. Processes started by `multiprocessing` run no `atexit` functions, hence
    the finalizer beside it.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        atexit.unregister(_destroy)  # once is enough
        atexit.register(_destroy)
        util.Finalize(None, _destroy, exitpriority=10)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
