"""Which kernel computes attention over the segments of a worker.

Kernels are not ours: each name in `KERNELS` stands for one that others wrote. An own one is registered by its name:

    KERNELS["mine"] = MyKernel  # a class, or any function without arguments that returns an `AttentionKernel`
    kernel_for(torch.device("cuda"), "mine")
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch

from odb_libra_lightning.libra.kernel_interface import AttentionKernel


def _cpu() -> AttentionKernel:
    from odb_libra_lightning.libra.cpu_kernel import CpuKernel

    return CpuKernel()


def _flash_attn() -> AttentionKernel:
    from odb_libra_lightning.libra.flash_kernels import FlashAttnKernel

    return FlashAttnKernel()


def _torch_flash() -> AttentionKernel:
    if not torch.backends.cuda.is_flash_attention_available():
        raise ValueError("the kernel 'torch_flash' needs a PyTorch built for CUDA with FlashAttention; this one is not")
    from odb_libra_lightning.libra.flash_kernels import TorchFlashKernel

    return TorchFlashKernel()


KERNELS: dict[str, Callable[[], AttentionKernel]] = {
    "cpu": _cpu,
    "flash_attn": _flash_attn,
    "torch_flash": _torch_flash,
}
"""What makes each kernel, by name."""


def kernel_for(device: torch.device, kernel: str | AttentionKernel | None = None) -> AttentionKernel:
    """The kernel that is meant: of a name, given as an object, or the one for a device; the same object each time.

    Args:
        device: where the tensors are.
        kernel: a name in `KERNELS`, or a kernel, which is returned as it is. None: "cpu" on a CPU; on CUDA "flash_attn"
            where it is installed and can be used, else "torch_flash". The choice is made once a process; where
            flash-attn is installed and cannot be used, a warning says why.

    Raises:
        ValueError: there is no such name, it is not installed, or no kernel is known for the device.
        TypeError: `kernel` is neither a name nor a kernel.
    """
    if kernel is None:
        kernel = _default_name(device.type)
    if not isinstance(kernel, str):
        if isinstance(kernel, type) or not all(callable(getattr(kernel, name, None)) for name in _METHODS):
            what = f"the class {kernel.__name__}" if isinstance(kernel, type) else f"a {type(kernel).__name__}"
            raise TypeError(f"kernel is {what}: expected a name or an AttentionKernel")
        return kernel
    if kernel not in KERNELS:
        raise ValueError(f"no attention kernel is called {kernel!r}; there are {', '.join(sorted(KERNELS))}")
    return _made(KERNELS[kernel])


_METHODS = ("forward", "backward")


@functools.cache
def _default_name(device_type: str) -> str:
    """The name of the best kernel; asked for at every call of attention, and looking for a package is slow."""
    if device_type == "cpu":
        return "cpu"
    if device_type != "cuda":
        raise ValueError(f"no attention kernel is known for {device_type}; name one of {', '.join(sorted(KERNELS))}")
    try:
        if importlib.util.find_spec("flash_attn") is None:
            return "torch_flash"
        _made(KERNELS["flash_attn"])
    except Exception as error:  # a build for another PyTorch fails in any way
        warnings.warn(
            f"flash-attn is installed and cannot be used, so attention takes 'torch_flash': {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return "torch_flash"
    return "flash_attn"


@functools.cache
def _made(factory: Callable[[], AttentionKernel]) -> AttentionKernel:
    """One kernel of each kind: what it remembers of segments serves all layers."""
    return factory()
