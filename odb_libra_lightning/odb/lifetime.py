"""How processes of the data path begin and end: with the process that they work for, and never later."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import connection

_PR_SET_PDEATHSIG = 1


def end_with_parent(*, parent_is_main_thread: bool = True) -> None:
    """Have this child process end when its parent does, however that ends.

    The kernel sees to it at once where the parent itself started this process. A thread watches the parent besides,
    for processes that a fork server started, and off Linux.

    Args:
        parent_is_main_thread: whether the parent's main thread started this process. The kernel counts the end of
            another thread as that of the parent, so it is not asked then.
    """
    # A fork inherits the parent's garbage. Collected here, a key-value store among it would wait for threads that exist
    # in the parent alone.
    gc.freeze()
    gc.enable()
    parent = multiprocessing.parent_process()
    assert parent is not None, "only for processes that multiprocessing started"
    if parent_is_main_thread and sys.platform.startswith("linux") and os.getppid() == parent.pid:
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Start a process that calls `end_with_parent` without a collection in it before that."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def obey_parent_alone() -> None:
    """Leave Ctrl-C to the parent, and end at its `terminate()`.

    A trainer may have put its own SIGTERM handler in place before a fork; this process must not run it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _watch(parent: int) -> None:
    connection.wait([parent])
    os._exit(1)
