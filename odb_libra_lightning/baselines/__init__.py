"""What Libra is compared with: context-parallel attention that stays inside a replica, and all attentions by name.

`ulysses_attention` and `ring_attention` compute what `libra_attention` does, on the same shards, from the same plan.
"""

from odb_libra_lightning.baselines.attentions import ATTENTIONS, attention_for
from odb_libra_lightning.baselines.ring import ring_attention
from odb_libra_lightning.baselines.ulysses import ulysses_attention

__all__ = ["ATTENTIONS", "attention_for", "ring_attention", "ulysses_attention"]
