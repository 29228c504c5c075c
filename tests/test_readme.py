"""The README's snippet runs as it stands, given what it says is the reader's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.modules import BigramModel
from tests.samples import Documents, pad

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_plug_in_snippet_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    module = BigramModel()
    names: dict[str, Any] = {"train_dataset": Documents(50), "collate": pad, "module": module}
    exec(snippet, names)
    assert sorted(i for batch in module.seen for i in batch) == list(range(50))
    assert names["data"].loader.config.l_max == 16_384
    assert "Training summary" in capsys.readouterr().out


def test_the_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 8
    for link in links:
        assert (ROOT / link).exists(), link
