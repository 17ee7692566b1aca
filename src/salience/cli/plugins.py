"""List every plug-in: filters, scores, samplers and curves, built in or installed, and where each comes from.

Installed is not enabled: a plug-in is only used by a run that names it in `select`.
"""

from __future__ import annotations

import argparse
from typing import Any

from salience.cli.text import subcommand
from salience.report.console import columns, say


def add(commands: Any) -> None:
    subcommand(commands, "plugins", __doc__, run)


def run(args: argparse.Namespace) -> int:
    from salience import registry

    rows = [("kind", "name", "from", "what it does")]
    for kind in registry.kinds():
        rows += [(kind, origin.name, origin.package, _about(kind, origin.name)) for origin in registry.catalogue(kind)]
    say(columns(rows))
    return 0


def _about(kind: str, name: str) -> str:
    """The first line of the plug-in's docstring, or the reason why it cannot be loaded; the others are listed anyway."""
    from salience import registry
    from salience.errors import PluginError

    try:
        return registry.summary(registry.find(kind, name))
    except PluginError as error:
        return f"broken: {error}"
