"""Online dynamic batching: token-budgeted batches formed after the data workers.

The pure rules are here by name; `ODBLoader` puts them to work.
"""

from odb_libra_lightning.odb.alignment import align_groups, group_target
from odb_libra_lightning.odb.cost import TokenCost
from odb_libra_lightning.odb.grouping import group_by_budget, target_batch_size

__all__ = ["TokenCost", "align_groups", "group_by_budget", "group_target", "target_batch_size"]
