"""How processes of the data path end: with the process that they work for, and never later."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this process when its parent dies, however it dies; does nothing off Linux."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call took hold
        os._exit(1)


def obey_parent_alone() -> None:
    """Leave Ctrl-C to the parent, end at its `terminate()`, and die when it dies.

    A trainer may have put its own SIGTERM handler in place before a fork; this process must not run it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
