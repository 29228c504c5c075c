"""Models of transformers that train under context parallelism, as they are.

transformers is optional: nothing here needs it before a module holds one of its models.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, SupportsIndex

from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from odb_libra_lightning.libra.active_attention import active
from odb_libra_lightning.strategies.attention_heads import AttentionHeads, heads_of_config
from odb_libra_lightning.strategies.huggingface_attention import NAME, register
from odb_libra_lightning.strategies.huggingface_checks import check_model
from odb_libra_lightning.strategies.unsupported import refuse_mixing_layers

__all__ = ["AttentionHeads", "Installed", "attention_heads", "install"]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Models that attend by `core_attention` until `restore`.

    Attributes:
        models: names of the models within the module.
        heads: kinds of their attention layers, each once.
    """

    models: tuple[str, ...] = ()
    heads: tuple[AttentionHeads, ...] = ()
    _before: tuple[tuple[Any, Any], ...] = ()
    _hooks: tuple[RemovableHandle, ...] = ()

    def restore(self) -> None:
        """Put back the attention that each model had; again does nothing."""
        for config, before in self._before:
            config._attn_implementation = before
        for hook in self._hooks:
            hook.remove()


def install(root: nn.Module, *, training: bool = True) -> Installed:
    """Have every model of transformers in a module attend by `core_attention`.

    Models are found inside wrappers too, compiled ones among them. Installing twice is as good as once.

    Args:
        root: a LightningModule, or any other.
        training: whether gradients are wanted, so that attention dropout counts.

    Returns:
        What was installed, to be restored after training.

    Raises:
        ValueError: the module mixes positions in a way that context parallelism does not compute. Nothing has been
            changed then.
    """
    models = dict(_models_in(root))
    for name, model in models.items():
        for part in _with_own_configs(model):
            check_model(part, name, training=training)
    refuse_mixing_layers(root)
    if not models:
        return Installed()
    register()
    configs = [part.config for model in models.values() for part in _with_own_configs(model)]
    before = [(config, _before(config._attn_implementation)) for config in configs]
    for model in models.values():
        model.set_attn_implementation(NAME)
    for config, implementation in before:
        config._attn_implementation = _Name(implementation)
    return Installed(
        models=tuple(models),
        heads=tuple(attention_heads(root)),
        _before=tuple(before),
        _hooks=tuple(
            hook
            for model in models.values()
            for part in model.modules()
            if _is_model(part)
            for hook in _position_hooks(part)
        ),
    )


def attention_heads(root: nn.Module) -> list[AttentionHeads]:
    """The kinds of attention layers of the models of transformers in a module, each once.

    Args:
        root: a LightningModule, a model, or any other module.
    """
    parts = [part for _, model in _models_in(root) for part in _with_own_configs(model)]
    return list(dict.fromkeys(heads for part in parts for heads in heads_of_config(part.config)))


class _Name(str):
    """The name "libra" in a config, which is pickled as what was there before.

    A config may be among the hyperparameters of a checkpoint, and must be read without this package. Copies made
    within the process, of a model or of its config, attend as the original.
    """

    before: str

    def __new__(cls, before: str) -> _Name:
        name = super().__new__(cls, NAME)
        name.before = before
        return name

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return str, (self.before,)

    def __copy__(self) -> _Name:
        return self

    def __deepcopy__(self, memo: object) -> _Name:
        return self


def _before(implementation: str) -> str:
    return implementation.before if isinstance(implementation, _Name) else implementation


def _is_model(module: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")  # a model exists only where it was imported
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _models_in(root: nn.Module, name: str = "") -> Iterator[tuple[str, Any]]:
    """Models that are part of no other, by name."""
    if _is_model(root):
        yield name or "the model", root
        return
    for child_name, child in root.named_children():
        yield from _models_in(child, f"{name}.{child_name}" if name else child_name)


def _with_own_configs(model: Any) -> list[Any]:
    """A model and those within it, one for each config: most share the outermost one's."""
    parts: dict[int, Any] = {}
    for part in model.modules():
        if _is_model(part):
            parts.setdefault(id(part.config), part)
    return list(parts.values())


def _position_hooks(model: Any) -> Iterator[RemovableHandle]:
    """Without positions a model counts from 0, on every rank: refuse that while a strategy shards sequences."""
    parameters = list(inspect.signature(model.forward).parameters)
    if "position_ids" not in parameters:
        return
    place = parameters.index("position_ids")

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[place] if len(args) > place else kwargs.get("position_ids")
        attends = active()
        if attends is None:
            return
        if given is None:
            raise ValueError(
                f"{type(module).__name__} was called without position_ids, and would count this rank's tokens from 0, "
                "which are not the first of their documents: call it with position_ids=batch['position_ids']"
            )
        expected = getattr(attends, "position_ids", None)
        if expected is None or given is expected:  # the same tensor, as a rule: comparing values would wait for a GPU
            return
        if given.shape[-1] != expected.shape[-1] or bool((given != expected).any()):
            raise ValueError(
                f"{type(module).__name__} was called with other position_ids than the batch's, and this rank's tokens "
                "would stand elsewhere in their documents: call it with position_ids=batch['position_ids']"
            )

    yield model.register_forward_pre_hook(check, with_kwargs=True)
