"""Plug-ins found by name: built in, installed by entry point, never twice."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from salience import registry
from salience.errors import PluginError


def package(tmp_path, monkeypatch, entry: str, code: str = ""):
    """An installed distribution, as pip leaves it on disk."""
    info = tmp_path / "extra_plugins-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-plugins\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(entry))
    (tmp_path / "extra_plugins.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.forget_installed()


@pytest.fixture(autouse=True)
def _clean():
    yield
    registry.forget_installed()


def test_an_installed_plug_in_is_listed_with_its_origin_and_found(tmp_path, monkeypatch):
    code = '''
    def newest(view):
        """The newest first."""
        return view.age
    '''
    package(tmp_path, monkeypatch, "[salience.scores]\nnewest = extra_plugins:newest\n", code)
    origin = next(o for o in registry.catalogue("scores") if o.name == "newest")
    assert (origin.package, origin.target) == ("extra-plugins 1.2", "extra_plugins:newest")
    assert registry.summary(registry.find("scores", "newest")) == "The newest first."


def test_a_name_provided_twice_is_an_error(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, "[salience.scores]\nloss = extra_plugins:loss\n")
    with pytest.raises(PluginError, match="provided twice, by salience and by extra-plugins"):
        registry.catalogue("scores")


def test_a_plug_in_that_cannot_be_loaded_says_where_it_comes_from(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, "[salience.scores]\ngone = extra_plugins:gone\n")
    with pytest.raises(PluginError, match=r"'gone' of extra-plugins 1\.2 cannot be loaded"):
        registry.find("scores", "gone")


def test_the_core_imports_with_torch_and_numpy_alone():
    code = """
    import sys
    class Refuse:
        def find_spec(self, name, *rest):
            if name.partition(".")[0] in ("rich", "PIL", "psutil", "redis", "obstore", "safetensors", "jinja2"):
                raise ImportError(name)
    sys.meta_path.insert(0, Refuse())
    import salience, salience.testing, salience.app.models, salience.app.pixels, salience.cli
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_the_public_names_are_the_documented_ones():
    import pathlib
    import re

    import salience

    page = (pathlib.Path(__file__).parents[1] / "docs" / "api.md").read_text()
    documented = set(re.findall(r"^### `(?:salience\.)?(\w+)", page, flags=re.M))
    assert documented == set(salience.__all__) - {"__version__"}


def test_public_names_and_modules_are_imported_when_they_are_asked_for():
    code = (
        "import sys, salience\nassert 'torch' not in sys.modules\nassert not hasattr(salience, 'Laoder')\n"
        "assert callable(salience.ledger.save)\nassert all(hasattr(salience, name) for name in salience.__all__)\n"
        "assert set(salience.__all__) <= set(dir(salience))\nfrom salience import *\nassert Loader is salience.Loader"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_loader_comes_without_what_it_may_never_need():
    code = (
        "import sys\nfrom salience import Loader\n"
        "ours = ('report.html', 'report.charts', 'feed.cache', 'feed.process', 'feed.sharing.job', 'decide.auto')\n"
        "for name in ('numpy.random', *(f'salience.{name}' for name in ours)):\n"
        "    assert name not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
