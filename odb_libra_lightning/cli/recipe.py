"""Read a recipe: Hydra composes it, and a mistake in it becomes one sentence before anything is built.

`compose_recipe` gives the recipe as written, interpolations included; `resolve_recipe` gives the values that
run, checked against the signatures of what they are meant for; `recipe_yaml` is what a run leaves behind.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError
from yaml import MarkedYAMLError  # type: ignore[import-untyped]

from odb_libra_lightning.cli.nearest import did_you_mean, nearest_of, nearest_target

_HYDRA_KEYS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
_RUN_DIR = "__RUN_DIR__"


class RecipeError(ValueError):
    """A recipe or an override that cannot be run; its text is one sentence that says what to change."""


@dataclass(frozen=True)
class Sections:
    """The sections of a recipe, checked as the arguments of any target are."""

    run: dict[str, Any]
    module: dict[str, Any]
    trainer: dict[str, Any]
    seed: int | None = None
    data: dict[str, Any] | None = None
    callbacks: dict[str, Any] | None = None
    logger: dict[str, Any] | None = None
    resume: str | None = None


@dataclass(frozen=True)
class RunSection:
    """The keys of `run`: what the run is called and where its results go."""

    name: str
    dir: str
    root: str = "runs"


def compose_recipe(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a recipe file with its `defaults` and the overrides, through Hydra.

    Args:
        path: A `.yaml` file anywhere; groups are looked up in its own folder and in `hydra.searchpath`.
        overrides: Hydra overrides: `a.b=1`, `+a.b=1`, `~a.b`, `group=option`.

    Returns:
        The composed recipe, interpolations not yet resolved.

    Raises:
        RecipeError: A file, group option or key that does not exist, or text that cannot be parsed.
    """
    path = Path(path)
    if path.suffix != ".yaml" or not path.is_file():
        fault = "is not a .yaml file" if path.is_file() else "does not exist"
        nearest = nearest_of(path.name, [file.name for file in path.parent.glob("*.yaml")])
        candidates = [Path("recipes", path.name).with_suffix(".yaml"), path.with_name(nearest or path.name)]
        instead = next((str(candidate) for candidate in candidates if candidate.is_file() and candidate != path), None)
        raise RecipeError(f"recipe {path} {fault}{did_you_mean(instead)}")
    with initialize_config_dir(str(path.absolute().parent), version_base="1.3"), warnings.catch_warnings():
        # Hydra only warns about a folder missing from the search path, and then misses the files in it.
        warnings.filterwarnings("error", message="provider=", category=UserWarning)
        try:
            return typing.cast("DictConfig", compose(path.stem, list(overrides)))
        except Exception as error:
            raise RecipeError(_composition_fault(path, overrides, error)) from error


def resolve_recipe(recipe: DictConfig, *, run_dir: str | None = None) -> DictConfig:
    """Resolve a composed recipe and check it against the signatures of its targets.

    Args:
        recipe: What `compose_recipe` returned; left as it is.
        run_dir: Takes the place of `run.dir`.

    Raises:
        RecipeError: An unknown or missing key, a value of the wrong type, an interpolation that leads
            nowhere, or a `_target_` that cannot be imported. Targets are imported, not called.
    """
    recipe = copy.deepcopy(recipe)
    if run_dir is not None:
        recipe.run.dir = run_dir
    _resolve(recipe)
    tree = typing.cast("dict[str, Any]", OmegaConf.to_container(recipe))
    _check_arguments(tree, Sections, "", "a section of a recipe")
    _check_arguments(tree["run"], RunSection, "run", "a key of run")
    callbacks = tree.get("callbacks") or {}
    if not isinstance(callbacks, dict):
        raise RecipeError("callbacks must map names to nodes with _target_, not list them")
    for section in ("module", "data", "trainer", "logger"):
        _check_is_target(tree.get(section), section)
    for name, node in callbacks.items():
        _check_is_target(node, f"callbacks.{name}")
    for name in ("callbacks", "logger"):
        if name in tree["trainer"]:
            raise RecipeError(f"trainer.{name} is not read; did you mean {name}, a section of its own?")
    _check_targets(tree, "")
    return recipe


def recipe_yaml(recipe: DictConfig) -> str:
    """Write a composed recipe with its values resolved, as a recipe that can be run again.

    `run.dir`, and what points into it, stays an interpolation, so that the next run gets its own folder.
    """
    run_dir = typing.cast("dict[str, str]", OmegaConf.to_container(recipe.run, resolve=False))["dir"]
    recipe = copy.deepcopy(recipe)
    recipe.run.dir = _RUN_DIR
    OmegaConf.resolve(recipe)
    recipe.run.dir = run_dir
    return OmegaConf.to_yaml(recipe).replace(_RUN_DIR, "${run.dir}")


def one_line(error: BaseException) -> str:
    """The message of an error on one line, with its class where the message is too short to stand alone."""
    text = str(error).split("\n    full_key:")[0]
    if not text and error.__cause__ is not None:
        return one_line(error.__cause__)
    words = text.split()
    return " ".join(words if len(words) > 2 else [f"{type(error).__name__}:", *words])


def _composition_fault(path: Path, overrides: Sequence[str], error: Exception) -> str:
    """Say why Hydra could not compose; for an override that means finding the one to blame."""
    if isinstance(error, OverrideParseException):
        noise = ("Error parsing override", "LexerNoViableAlt", "See https://")
        lines = [line for line in str(error).splitlines() if not line.startswith(noise) and line.strip(" ^")]
        return ": ".join([f"override {error.override} cannot be read", *lines])
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, UserWarning):
        return f"hydra.searchpath: {one_line(error)}"
    if isinstance(error, MissingConfigException):
        return _missing_file(path, overrides, str(error.missing_cfg_file))
    # Hydra applies groups before keys whatever their order, so the culprit is found in that order.
    good: list[str] = []
    keys: list[Override] = []
    try:
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            name, is_mapping = override.key_or_group, isinstance(override.value(), dict)
            if name.startswith("hydra.") or (_group_options(path, overrides, name) and not is_mapping):
                good.append(str(override.input_line))
            else:
                keys.append(override)
        recipe = compose(path.stem, good)
    except Exception as fault:
        return f"{path}: {one_line(fault)}"
    for override in keys:
        good.append(str(override.input_line))
        try:
            recipe = compose(path.stem, good)
        except Exception as fault:
            groups = _group_options(path, overrides, "", ObjectType.GROUP)
            return _override_fault(OmegaConf.to_container(recipe, resolve=False), groups, override, fault)
    return f"{path}: {one_line(error)}"


def _missing_file(path: Path, overrides: Sequence[str], missing: str) -> str:
    """Say which file the defaults list or an override of a group asked for in vain."""
    group, _, option = missing.rpartition("/")
    options, choice = _group_options(path, overrides, group), f"{group}=" if group else ""
    if not options:
        nearest = nearest_of(group, _group_options(path, overrides, "", ObjectType.GROUP))
        where = f"no folder {group} beside {path} or in hydra.searchpath"
        return f"{choice}{option}: {where}{did_you_mean(nearest)}"
    nearest = nearest_of(option, options)
    instead = did_you_mean(choice + nearest) if nearest else f"; choose from {', '.join(options)}"
    return f"{choice}{option}: there is no {missing}.yaml{instead}"


def _override_fault(tree: Any, groups: Sequence[str], override: Override, fault: Exception) -> str:
    """Say what is wrong with the one override that the recipe in `tree` does not take."""
    key, line = override.key_or_group, str(override.input_line)
    if _nearest_key(tree, key, arguments=False) == key:
        key = getattr(fault.__cause__, "full_key", None) or key  # in a={b: 1} the wrong key may be a.b
    nearest = _nearest_key(tree, key) or nearest_of(key, groups)
    exists = _nearest_key(tree, key, arguments=False) == key
    if override.is_sweep_override():
        return f"override {line} gives {key} several values; write [...] for a list or quote the value"
    if override.is_add() and exists:
        return f"{key} is in the recipe already; did you mean {line[1:]}?"
    if override.is_delete() and not exists:
        return f"~{key}: the recipe has no {key}{did_you_mean(nearest and f'~{nearest}')}"
    if not exists and nearest in (None, key):
        return f"{key} is not in the recipe; write +{line} to add it"
    if not exists:
        return f"{key} is not in the recipe{did_you_mean(nearest)}"
    return f"override {line}: {one_line(fault.__cause__ or fault)}"


def _group_options(path: Path, overrides: Sequence[str], group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
    """The files, or the folders, in a group that the recipe at `path` can choose from."""
    loader = GlobalHydra.instance().config_loader()
    return list(loader.get_group_options(group, kind, config_name=path.stem, overrides=list(overrides)))


def _resolve(recipe: DictConfig) -> None:
    """Resolve in place, leaf by leaf first: only so can an error name the key it comes from."""
    leaves = list(_leaves(recipe, ""))
    for key, container, name in leaves:
        if not OmegaConf.is_interpolation(container, name) and OmegaConf.is_missing(container, name):
            raise RecipeError(f"{key} must be given, as in {key}=...")
    for key, container, name in leaves:
        try:
            container[name]
        except OmegaConfBaseException as error:
            missing = re.match(r"Interpolation key '(.+?)' not found", str(error))
            if missing is None:
                raise RecipeError(f"{key}: {one_line(error)}") from error
            tree = OmegaConf.to_container(recipe, resolve=False)
            nearest = _nearest_key(tree, missing[1], arguments=False)
            raise RecipeError(
                f"{key} refers to ${{{missing[1]}}}, which is not in the recipe"
                f"{did_you_mean(nearest and f'${{{nearest}}}')}"
            ) from error
    OmegaConf.resolve(recipe)


def _leaves(node: DictConfig | ListConfig, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the full key, the container and the name in it of every value and unresolved interpolation."""
    for name in range(len(node)) if isinstance(node, ListConfig) else list(node):
        key = _join(prefix, name)
        is_leaf = OmegaConf.is_interpolation(node, name) or OmegaConf.is_missing(node, name)
        if not is_leaf and OmegaConf.is_config(node[name]):
            yield from _leaves(node[name], key)
        else:
            yield key, node, name


def _check_targets(value: Any, key: str) -> None:
    """Check every node with a `_target_` in a resolved recipe against the signature of that target."""
    if isinstance(value, list):
        for position, item in enumerate(value):
            _check_targets(item, _join(key, position))
    elif isinstance(value, dict):
        if "_target_" in value:
            _check_arguments(value, _locate(value["_target_"], key), key, f"an argument of {value['_target_']}")
        # With `_recursive_: false` the target builds what is inside, perhaps with arguments of its own.
        if value.get("_recursive_", True):
            for name, item in value.items():
                _check_targets(item, _join(key, name))


def _check_arguments(node: Mapping[str, Any], target: Callable[..., Any], key: str, what: str) -> None:
    """Check the names, the presence and the plain values of what `target` would be called with."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # some builtins do not tell their signature
        return
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = {*node, *positional[: len(node.get("_args_", ()))]}
    for name in node:
        if name not in named and name not in _HYDRA_KEYS and not takes_any:
            nearest = nearest_of(str(name), [*named, *_HYDRA_KEYS])
            raise RecipeError(f"{_join(key, name)} is not {what}{did_you_mean(nearest and _join(key, nearest))}")
    for parameter in parameters:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        required = parameter.default is parameter.empty and not variadic and not node.get("_partial_", False)
        if required and parameter.name not in given:
            raise RecipeError(f"{_join(key, parameter.name)} must be given: it is {what} without a default")
    function = inspect.unwrap(getattr(target, "__init__", target) if inspect.isclass(target) else target)
    for name, parameter in named.items():
        value, default = node.get(name, parameter.default), parameter.default
        # A default may contradict its own annotation, as in `size: int = None`, and still be given.
        is_default = value is default or (type(value) is type(default) and value == default)
        if _is_plain(value) and not is_default:
            hint = _hint(parameter.annotation, getattr(function, "__globals__", {}))
            if not _fits(value, hint):
                expected = inspect.formatannotation(hint).replace("typing.", "").replace("NoneType", "None")
                raise RecipeError(f"{_join(key, name)} is {value!r}, but {expected} is expected")


def _check_is_target(node: Any, key: str) -> None:
    if node is not None and not isinstance(node, dict):
        raise RecipeError(f"{key} is {node!r}, but a mapping with _target_ is expected")
    if node is not None and "_target_" not in node:
        typo = nearest_of("_target_", map(str, node))
        instead = f" in place of {key}.{typo}" if typo else ""
        raise RecipeError(f"{key}._target_ must be given{instead}: the class or function to call")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _hint(annotation: Any, namespace: dict[str, Any]) -> Any:
    """Resolve one annotation by itself: a name imported for type checkers only must not hide the others."""
    if annotation is inspect.Parameter.empty:
        return Any
    holder: Any = SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, namespace, include_extras=True)["value"]
    except Exception:
        return Any


def _fits(value: Any, hint: Any) -> bool:
    """Whether pydantic takes a value for a hint; what pydantic cannot judge is left to the target."""
    try:
        TypeAdapter[Any](hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except Exception as error:
        return not isinstance(error, ValidationError)
    return True


def _locate(path: Any, key: str) -> Callable[..., Any]:
    """Import a target by its dotted path, as Hydra will."""
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it logs what it raises
    try:
        target = get_object(str(path))
    except Exception as error:
        raise RecipeError(
            f"{key}._target_ {path} cannot be imported: {one_line(error.__cause__ or error)}"
            f"{did_you_mean(nearest_target(str(path)))}"
        ) from error
    if not callable(target):
        raise RecipeError(f"{key}._target_ {path} is neither a class nor a function")
    return typing.cast("Callable[..., Any]", target)


def _nearest_key(tree: Any, key: str, *, arguments: bool = True) -> str | None:
    """Follow a dotted key through a recipe, taking the nearest name wherever there is no exact one.

    Args:
        tree: The recipe as plain containers.
        key: The dotted key.
        arguments: Whether the arguments a target takes count as well as the keys the recipe sets.
    """
    found: list[str] = []
    node, known = tree, set(Sections.__dataclass_fields__) if arguments else set()
    for part in key.split("."):
        if not isinstance(node, dict):
            return None
        known |= set(map(str, node))
        if arguments and "_target_" in node:
            with suppress(RecipeError, TypeError, ValueError):
                known |= set(inspect.signature(_locate(node["_target_"], "")).parameters)
        nearest = nearest_of(part, known)
        if nearest is None:
            return None
        found.append(nearest)
        node, known = node.get(nearest), set()
    return ".".join(found)


def _join(prefix: str, name: str | int) -> str:
    return f"{prefix}[{name}]" if isinstance(name, int) else f"{prefix}.{name}".lstrip(".")
