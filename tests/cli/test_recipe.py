"""Composition of recipes, and the one sentence that each mistake in one gives."""

# ruff: noqa: E501 (the sentences stand here whole)

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from odb_libra_lightning.cli.recipe import RecipeError, compose_recipe, recipe_yaml, resolve_recipe

RECIPES = Path(__file__).parents[2] / "recipes"

TARGETS = """\
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nowhere import Unknown


class Model:
    def __init__(
        self,
        width: int,
        rate: float = 0.1,
        mode: Literal["a", "b"] = "a",
        sizes: list[int] | None = None,
        unknown: Unknown = None,
        inner: Any = None,
        implicit: int = None,
    ):
        pass


class Open:
    def __init__(self, width: int, **options):
        pass


def positional(first: int, second: int, /, third: int = 3):
    pass


@dataclass
class Record:
    size: int = 1


constant = 3
"""

RECIPE = """\
hydra:
  searchpath: [file://{recipes}]
defaults:
  - base
  - trainer: cpu_single
  - logger: none
  - monitoring: none
  - _self_
run: {{name: test, root: {root}}}
module: {{_target_: recipe_targets.Model, width: 4}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe outside `recipes/`, which takes the shared groups through Hydra's search path."""
    (tmp_path / "recipe_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "recipe_targets", raising=False)
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.format(recipes=RECIPES, root=tmp_path / "runs"))
    return path


def load(path: Path, *overrides: str):
    return resolve_recipe(compose_recipe(path, overrides))


def sentence(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(path, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_groups_come_from_the_search_path_and_the_recipe_has_the_last_word(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "trainer: {max_epochs: 7}\n")
    config = load(recipe)
    assert (config.trainer._target_, config.trainer.devices, config.trainer.max_epochs) == (
        "lightning.Trainer",
        1,
        7,
    )
    assert (config.seed, config.resume, config.data) == (0, None, None)


@pytest.mark.parametrize("trainer", ["cpu_single", "cpu_ddp2", "gpu_ddp"])
@pytest.mark.parametrize("logger", ["none", "tensorboard", "offline"])
def test_every_trainer_and_logger_option_passes_the_check(recipe: Path, trainer: str, logger: str) -> None:
    config = load(recipe, f"trainer={trainer}", f"logger={logger}")
    assert config.logger.run_dir == config.trainer.default_root_dir == config.run.dir
    assert (config.logger.wandb, config.logger.tensorboard) == (logger == "offline", logger != "none")


def test_monitoring_is_one_more_callback(recipe: Path) -> None:
    config = compose_recipe(recipe, ["monitoring=default"])
    assert config.callbacks.monitoring._target_ == "odb_libra_lightning.callbacks.monitoring"
    assert compose_recipe(recipe, ["monitoring=none"]).callbacks == {"monitoring": None}


def test_overrides_change_add_and_drop(recipe: Path) -> None:
    config = load(recipe, "module.width=5", "+module.rate=0.5", "~trainer.precision", "trainer=cpu_ddp2")
    assert (config.module.width, config.module.rate) == (5, 0.5)
    assert config.trainer.strategy == "ddp"
    assert "precision" not in config.trainer


def test_interpolation_follows_an_override(recipe: Path) -> None:
    config = load(recipe, "run.dir=/somewhere", "logger=offline")
    assert (config.trainer.default_root_dir, config.logger.run_dir) == ("/somewhere", "/somewhere")


def test_the_run_folder_is_named_after_the_run_and_the_time(recipe: Path) -> None:
    run = load(recipe).run
    assert re.fullmatch(re.escape(f"{run.root}/test/") + r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", run.dir)


def test_a_given_run_folder_takes_the_place_of_the_composed_one(recipe: Path) -> None:
    composed = compose_recipe(recipe)
    assert resolve_recipe(composed, run_dir="/given").trainer.default_root_dir == "/given"
    assert resolve_recipe(composed).run.dir != "/given"


def test_the_saved_recipe_is_resolved_but_for_its_folder(recipe: Path, tmp_path: Path) -> None:
    overrides = ["module.width=9", "+module.rate=${seed}", "logger=offline"]
    saved = tmp_path / "elsewhere" / "config.yaml"
    saved.parent.mkdir()
    saved.write_text(recipe_yaml(compose_recipe(recipe, overrides)))
    assert "rate: 0\n" in saved.read_text()

    first, again = load(recipe, *overrides), load(saved, "run.name=again")
    assert again.module == first.module
    assert again.run.dir.startswith(f"{first.run.root}/again/")
    assert again.trainer.default_root_dir == again.logger.run_dir == again.run.dir


@pytest.mark.parametrize(
    ("override", "said"),
    [
        # keys
        ("trainer.max_epoch=1", "trainer.max_epoch is not in the recipe; did you mean trainer.max_epochs?"),
        ("trianer.max_epoch=1", "trianer.max_epoch is not in the recipe; did you mean trainer.max_epochs?"),
        ("trainer={max_epoch: 1}", "trainer.max_epoch is not in the recipe; did you mean trainer.max_epochs?"),
        ("run.nmae=x", "run.nmae is not in the recipe; did you mean run.name?"),
        ("monitorin=none", "monitorin is not in the recipe; did you mean monitoring?"),
        ("module.rate=0.5", "module.rate is not in the recipe; write +module.rate=0.5 to add it"),
        ("+module.rat=1", "module.rat is not an argument of recipe_targets.Model; did you mean module.rate?"),
        ("+modul.rate=1", "modul is not a section of a recipe; did you mean module?"),
        ("+run.rot=1", "run.rot is not a key of run; did you mean run.root?"),
        ("+module._partail_=true", "module._partail_ is not an argument of recipe_targets.Model; did you mean module._partial_?"),
        ("~trainer.precison", "~trainer.precison: the recipe has no trainer.precison; did you mean ~trainer.precision?"),
        ("+module.width=1", "module.width is in the recipe already; did you mean module.width=1?"),
        ("~module.width", "module.width must be given: it is an argument of recipe_targets.Model without a default"),
        ("~module", "module must be given: it is a section of a recipe without a default"),
        ("run.name=???", "run.name must be given, as in run.name=..."),
        ("+trainer.callbacks=null", "trainer.callbacks is not read; did you mean callbacks, a section of its own?"),
        # groups
        ("trainer=cpu_dpd2", "trainer=cpu_dpd2: there is no trainer/cpu_dpd2.yaml; did you mean trainer=cpu_ddp2?"),
        ("logger=xyz", "logger=xyz: there is no logger/xyz.yaml; choose from none, offline, tensorboard"),
        # values
        ("module.width=abc", "module.width is 'abc', but int is expected"),
        ("+module.rate=fast", "module.rate is 'fast', but float is expected"),
        ("+module.mode=c", "module.mode is 'c', but Literal['a', 'b'] is expected"),
        ("+module.sizes=[1,x]", "module.sizes is [1, 'x'], but list[int] | None is expected"),
        ("trainer.max_epochs=abc", "trainer.max_epochs is 'abc', but Optional[int] is expected"),
        ("seed=x", "seed is 'x', but int | None is expected"),
        ("module=x", "module is 'x', but dict[str, Any] is expected"),
        ("logger.mode=onlin", "logger.mode is 'onlin', but Literal['offline', 'online'] is expected"),
        ("callbacks.monitoring=3", "callbacks.monitoring is 3, but a mapping with _target_ is expected"),
        ("+callbacks.x._traget_=a.B", "callbacks.x._target_ must be given in place of callbacks.x._traget_: the class or function to call"),
        # syntax
        ("trainer.devices=[1,2", "override trainer.devices=[1,2 cannot be read: no viable alternative at input '[1,2'"),
        ("run.name='x", "override run.name='x cannot be read"),
        ("word", "override word cannot be read: missing EQUAL at '<EOF>'"),
        ("seed=1,2", "override seed=1,2 gives seed several values; write [...] for a list or quote the value"),
        # interpolations
        ("run.dir=${run.rot}/x", "run.dir refers to ${run.rot}, which is not in the recipe; did you mean ${run.root}?"),
        ("+module.rate=${nothing}", "module.rate refers to ${nothing}, which is not in the recipe"),
        ("resume=${oc.env:NO_SUCH_VARIABLE}", "resume: KeyError raised while resolving interpolation: \"Environment variable 'NO_SUCH_VARIABLE' not found\""),
        ("resume=${resume}", "resume: Recursive interpolation detected"),
        # targets
        ("module._target_=no_such_package.X", "module._target_ no_such_package.X cannot be imported: No module named 'no_such_package'"),
        ("module._target_=recipe_targets.constant", "module._target_ recipe_targets.constant is neither a class nor a function"),
    ],
)  # fmt: skip
def test_a_wrong_override_gives_one_sentence(recipe: Path, override: str, said: str) -> None:
    assert sentence(recipe, override) == said


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("recipe_targets.Modle", "recipe_targets.Model"),
        ("lightning.Trianer", "lightning.Trainer"),
        ("lightning.pytorh.Trainer", "lightning.pytorch.Trainer"),
        ("odb_libra_lightning.ODBDataModul", "odb_libra_lightning.ODBDataModule"),
    ],
)
def test_a_target_that_cannot_be_imported_names_the_nearest(recipe: Path, wrong: str, right: str) -> None:
    said = sentence(recipe, f"module._target_={wrong}")
    assert said.startswith(f"module._target_ {wrong} cannot be imported: ")
    assert said.endswith(f"; did you mean {right}?")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("module: {", "modul: {", "modul is not a section of a recipe; did you mean module?"),
        ("width: 4", "widht: 4", "module.widht is not an argument of recipe_targets.Model; did you mean module.width?"),
        ("- base", "- bsae", "bsae: there is no bsae.yaml; did you mean base?"),
        ("cpu_single", "cpu_sigle", "trainer=cpu_sigle: there is no trainer/cpu_sigle.yaml; did you mean trainer=cpu_single?"),
        ("- logger:", "- loger:", "loger=none: no folder loger beside {path} or in hydra.searchpath; did you mean logger?"),
        ("width: 4}", "width: 4", "{path}, line 11: expected ',' or '}', but got '<stream end>'"),
        ("width: 4", "width: '${run.dir'", "{path}: no viable alternative at input '${run.dir'"),
        ("- base", "- base\n\t- base", "{path}, line 5: found character '\\t' that cannot start any token"),
        ("width: 4}", "width: 4}\nrun: {}", "{path}, line 11: found duplicate key run"),
        ("searchpath: [file:", "searchpath: [file:/nowhere", "hydra.searchpath: provider=hydra.searchpath in main, path="),
    ],
)  # fmt: skip
def test_a_wrong_recipe_gives_one_sentence(recipe: Path, old: str, new: str, said: str) -> None:
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))
    assert sentence(recipe).startswith(said.replace("{path}", str(recipe)))


def test_a_recipe_that_does_not_exist_names_the_nearest(recipe: Path) -> None:
    wrong = recipe.with_name("mien.yaml")
    assert sentence(wrong) == f"recipe {wrong} does not exist; did you mean {recipe}?"
    assert sentence(recipe.with_name("recipe_targets.py")).endswith("recipe_targets.py is not a .yaml file")
    assert sentence(recipe.parent).endswith("does not exist")


@pytest.mark.parametrize("content", [b"", b"- a\n", b"word\n", b"\xff\xfe\x00", b"run: 3\n"])
def test_a_file_that_is_no_recipe_gives_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.yaml"
    path.write_bytes(content)
    assert sentence(path)
    assert sentence(path, "seed=1", "trainer=cpu_ddp2")


def test_the_culprit_is_found_among_overrides_in_any_order(recipe: Path) -> None:
    # `strategy` exists only once the group has been chosen, which the command line says last.
    said = sentence(recipe, "trainer.strategy=auto", "seed=3", "trainer.stratgy=ddp", "trainer=cpu_ddp2")
    assert said == "trainer.stratgy is not in the recipe; did you mean trainer.strategy?"


def test_the_search_path_may_come_from_the_command_line(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().partition("defaults:")[1] + recipe.read_text().partition("defaults:")[2])
    searchpath = f"hydra.searchpath=[file://{RECIPES}]"
    assert load(recipe, searchpath, "trainer=cpu_ddp2").trainer.devices == 2
    assert sentence(recipe, "sed=1", searchpath) == "sed is not in the recipe; did you mean seed?"
    assert sentence(recipe, "trainer=cpu_dp2", searchpath).endswith("; did you mean trainer=cpu_ddp2?")


@pytest.mark.parametrize(
    "override",
    [
        "+module.unknown=x",  # the annotation cannot be resolved
        "+module.implicit=null",  # the default, though the annotation does not say so
        "+module.rate='0.5'",  # pydantic would convert it
        "+module.inner={_target_: recipe_targets.Record, size: 2}",
        "+module.inner={_target_: recipe_targets.Model, _partial_: true}",
        "+module.inner={_target_: recipe_targets.Model, _recursive_: false, width: 1, inner: {_target_: no.such}}",
        "+module.inner={_target_: recipe_targets.Open, width: 1, anything: 2}",
        "+module.inner={_target_: recipe_targets.positional, _args_: [1, 2], third: 4}",
        "+module.inner={_target_: builtins.dict, a: 1}",
    ],
)
def test_what_the_target_may_take_passes(recipe: Path, override: str) -> None:
    load(recipe, override)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("{_target_: recipe_targets.Record, sise: 2}", "module.inner.sise is not an argument of recipe_targets.Record; did you mean module.inner.size?"),
        ("[{_target_: recipe_targets.Record, size: x}]", "module.inner[0].size is 'x', but int is expected"),
        ("{_target_: recipe_targets.Open, anything: 2}", "module.inner.width must be given: it is an argument of recipe_targets.Open without a default"),
        ("{_target_: recipe_targets.positional, _args_: [1]}", "module.inner.second must be given: it is an argument of recipe_targets.positional without a default"),
    ],
)  # fmt: skip
def test_nested_nodes_are_checked(recipe: Path, node: str, said: str) -> None:
    assert sentence(recipe, f"+module.inner={node}") == said
