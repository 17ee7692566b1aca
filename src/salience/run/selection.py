"""What a user may give as `select`, and what it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from salience.config import SelectConfig, read_toml
from salience.errors import ConfigError
from salience.plan import Trace
from salience.select import preset

Select = str | SelectConfig | Mapping[str, Any] | Trace | None


def resolve(select: Select) -> SelectConfig | Trace | None:
    """What people write for `select` as a config: a preset's name, a TOML file, a table, a config, a trace, or nothing."""
    if select is None or isinstance(select, (SelectConfig, Trace)):
        return select
    table: dict[str, Any]
    if not isinstance(select, (str, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f'select is {select!r}; name a preset (select="default"), a TOML file or a table; None observes.'
        )
    if isinstance(select, str):
        if not select.endswith(".toml"):
            return preset(select)
        tables = read_toml(select)
        if "select" not in tables:
            raise ConfigError(f"{select!r} has no [select] table; write one, or name a preset.")
        table = dict(tables["select"])
    else:
        table = dict(select)
    return preset(table.pop("preset", "default")).merged(table)
