"""A page of sentences, charts and tables: for commands that look at ledgers rather than at one run's log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from salience.report.charts import Chart
from salience.report.html import rendered


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under a heading."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def sheet(
    over: str, title: str, *, said: Sequence[str], charts: Sequence[Chart] = (), tables: Sequence[Table] = ()
) -> str:
    """The page: the first sentence is its verdict."""
    return rendered("sheet.html", over=over, title=title, said=said, charts=charts, tables=tables)
