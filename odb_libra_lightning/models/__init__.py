"""LightningModules to start from; any other LightningModule does as well."""

from odb_libra_lightning.models.causal_lm import CausalLM

__all__ = ["CausalLM"]
