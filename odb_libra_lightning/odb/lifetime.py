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
from multiprocessing import connection, util
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
# A terminal sends Ctrl-C, and a cluster its signals, to all processes of a job at once. Only the trainer answers them:
# a handler that a fork inherited from it would, say, write a checkpoint from here as well.
_PARENTS_ALONE = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def end_with_parent(*, parent_is_main_thread: bool = True) -> None:
    """Have this child process end when its parent does, however that ends, and at no signal meant for that.

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
    for number in _PARENTS_ALONE:
        signal.signal(number, signal.SIG_IGN)
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


class Ending:
    """The one way, from whichever thread, in which a process ends that its parent may tell to."""

    def __init__(self) -> None:
        self._begun = threading.Lock()

    def begin(self) -> None:
        """Called by the main thread before it returns; what it ends must not be ended from another thread as well."""
        self._begun.acquire()

    def in_good_order(self) -> None:
        """End, whatever the main thread is doing: children first, and semaphores taken back.

        A process that is simply terminated leaves its semaphores, and the resource tracker complains about each.
        Nothing happens if the main thread has begun to end.
        """
        if self._begun.acquire(blocking=False):
            util._exit_function()  # type: ignore[attr-defined]  # what `multiprocessing` itself runs at the end of a process
            os._exit(0)

    def at_once(self) -> NoReturn:
        """End without any of that."""
        os._exit(1)


def _watch(parent: int) -> None:
    connection.wait([parent])
    os._exit(1)
