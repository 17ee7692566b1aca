"""Every registered plug-in goes through the public conformance kit; one that is added is tested without being named."""

from __future__ import annotations

import numpy as np
import pytest

from salience.registry import catalogue, kinds
from salience.select import Draw, Verdict
from salience.testing import check_plugin

EVERY = [(o.kind, o.name) for kind in kinds() for o in catalogue(kind)]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_plugin(kind, name):
    check_plugin(kind, name)


def changing(view):
    """Changes what it was given."""
    view._ledger.mean_loss[:] = 0
    return view.last_loss


def restless(view):
    """Gives another answer each time."""
    return np.random.default_rng().random(view.n)


def short(view):
    """Too short."""
    return np.zeros(3)


def silent(view):
    """Gives no reason."""
    return Verdict(keep=np.ones(view.n, dtype=bool))


def doubling(candidates, budget, rng):
    """Draws the same sample again and again."""
    return Draw(positions=np.zeros(budget, dtype=np.int64))


def undocumented(view):
    return view.last_loss


def too_much(clock):
    """More than everything."""
    return 1.5


@pytest.mark.parametrize(
    ("kind", "plugin", "says"),
    [
        ("scores", changing, "changed the ledger"),
        ("scores", restless, "two calls differ"),
        ("scores", short, "one number per sample"),
        ("scores", undocumented, "docstring"),
        ("filters", silent, "reason"),
        ("samplers", doubling, "sample twice"),
        ("curves", too_much, "allowed"),
    ],
)
def test_the_kit_catches_plugins_that_break_the_contract(kind, plugin, says):
    with pytest.raises(AssertionError, match=says):
        check_plugin(kind, plugin)
