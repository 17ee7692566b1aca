"""Settings: the same names in Python and TOML, wrong ones refused with a hint."""

from __future__ import annotations

import pytest

import salience
from salience.config import read_toml, train_config, use
from salience.errors import ConfigError
from salience.run import resolve
from salience.select import preset


def write(tmp_path, text):
    path = tmp_path / "s.toml"
    path.write_text(text)
    return str(path)


def test_toml_and_python_give_the_same_config(tmp_path):
    path = write(
        tmp_path,
        """
        [select]
        keep = 0.3
        sampler = { name = "probability", power = 2.0 }
        scores = ["loss", { name = "staleness", weight = 0.5 }]
        filters = []
        """,
    )
    assert resolve(path) == salience.SelectConfig(
        filters=(),
        scores=(salience.Use(name="loss"), salience.Use(name="staleness", weight=0.5)),
        sampler=salience.Use(name="probability", options={"power": 2.0}),
        keep=salience.Use(name="constant", options={"share": 0.3}),
        robust="auto",
    )


def test_a_table_changes_only_what_it_names(tmp_path):
    changed = resolve({"preset": "infobatch", "keep": 0.3})
    assert changed.sampler == preset("infobatch").sampler
    assert changed.keep.options == {"share": 0.3}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[select]\nkep = 0.3", "Did you mean 'keep'"),
        ("[selct]\nkeep = 0.3", "Did you mean 'select'"),
        ("[select]\nscores = 'loss'", "must be a list"),
        ("[select]\nscores = [{ weight = 1 }]", "names no plug-in"),
        ("[select]\nscores = [{ name = 'loss', weight = -1 }]", "at least 0"),
        ("select = 3", "must be a table"),
        ("[select", "not valid TOML"),
    ],
)
def test_wrong_settings_are_one_clear_sentence(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        resolve(write(tmp_path, text))


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml("nowhere.toml")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"epoch": 3}, "Did you mean 'epochs'"),
        ({"epochs": "3"}, "must be a whole number"),
        ({"epochs": 0}, "at least 1"),
        ({"lr": -1}, "at least 0"),
        ({"resume": 1}, "must be true or false"),
    ],
)
def test_train_settings_are_checked(table, says):
    with pytest.raises(ConfigError, match=says):
        train_config(table)


def test_a_function_can_stand_where_a_name_can():
    def mine(view):
        return view.last_loss

    assert use(mine).label == "mine"
    assert use({"name": mine, "weight": 2}).weight == 2.0
