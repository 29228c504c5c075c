"""Online dynamic batching and load-balanced context parallelism for PyTorch Lightning.

The two names most people need are here; the rest is in the rooms that `CONTRIBUTING.md` maps:
`odb` (batching rules, protocol and loader, no Lightning), `data` (the DataModule and datasets),
`callbacks` and `strategies` (the Lightning side).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odb_libra_lightning.data.collators import PackingCollator
    from odb_libra_lightning.data.datamodule import ODBDataModule
    from odb_libra_lightning.data.packed_datamodule import PackedDataModule
    from odb_libra_lightning.data.token_files import TokenFiles
    from odb_libra_lightning.odb.loader import ODBLoader

__version__ = "0.1.0"
__all__ = ["ODBDataModule", "ODBLoader", "PackedDataModule", "PackingCollator", "TokenFiles", "__version__"]

_HOMES = {
    "ODBDataModule": "odb_libra_lightning.data.datamodule",
    "ODBLoader": "odb_libra_lightning.odb.loader",
    "PackedDataModule": "odb_libra_lightning.data.packed_datamodule",
    "PackingCollator": "odb_libra_lightning.data.collators",
    "TokenFiles": "odb_libra_lightning.data.token_files",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the pure rules load without torch or Lightning."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
