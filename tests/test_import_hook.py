"""A function is called as soon as a module has been imported, once, and nothing is left behind."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from minloader import Loader
from minloader._worker.import_hook import forget, when_imported


@pytest.fixture
def late(tmp_path, monkeypatch):
    """The name of a module that nothing has imported."""
    (tmp_path / "comes_late.py").write_text("ready = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "comes_late"
    sys.modules.pop("comes_late", None)


def test_the_action_waits_for_the_import(late):
    before, seen = list(sys.meta_path), []

    def action(module: ModuleType) -> None:
        seen.append((module.__name__, module.ready))

    when_imported(late, action)
    when_imported(late, action)  # once is enough
    import json  # noqa: F401

    assert seen == []
    importlib.import_module(late)
    assert seen == [(late, True)]  # after its code was run
    when_imported(late, action)  # at once now
    assert seen == [(late, True)] * 2
    forget(late, action)
    assert sys.meta_path == before


def test_a_failed_import_is_not_an_import(late, tmp_path):
    path = tmp_path / "comes_late.py"
    path.write_text("raise ImportError('not yet')\n")
    seen: list[ModuleType] = []
    when_imported(late, seen.append)
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(late)
    assert seen == []
    path.write_text("ready = 'at last, and in a file of another size'\n")
    importlib.invalidate_caches()
    assert [importlib.import_module(late)] == seen
    forget(late, seen.append)


def test_what_is_forgotten_is_not_called(late):
    before = list(sys.meta_path)
    first: list[ModuleType] = []
    other: list[ModuleType] = []
    when_imported(late, first.append)
    when_imported(late, other.append)
    forget(late, first.append)
    module = importlib.import_module(late)
    assert (first, other) == ([], [module])
    forget(late, other.append)
    assert sys.meta_path == before


def test_batches_made_here_leave_the_import_path_as_it_was():
    before = list(sys.meta_path)
    with Loader(abs, range(3), num_workers=0) as loader:
        assert list(loader) == [0, 1, 2]
    assert sys.meta_path == before
