"""The conformance kit: checks that every plug-in, built in or your own, must pass.

from salience.testing import check_plugin
def test_my_score(): check_plugin("scores", my_score)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from salience.config import SelectConfig, Use
from salience.errors import ConfigError, PluginError
from salience.ledger import COLUMNS, Ledger
from salience.registry import summary
from salience.select.pipeline import Pipeline
from salience.select.plugins import Plugin, plugin_of
from salience.select.reference import reference_of
from salience.select.view import Candidates, Clock, Reference, View

N, CLASSES, WINDOWS = 240, 6, 12


def sample_ledger(*, windows: int = 4, seed: int = 0) -> Ledger:
    """A ledger like one after training: with classes, some hard samples, some wrong labels, and 10 samples never seen."""
    rng = np.random.default_rng(seed)
    ledger = Ledger(N)
    label = rng.integers(0, CLASSES, N)
    hardness = rng.random(N)
    seen = np.arange(N - 10)
    for window in range(windows):
        margin = (4 * (1 - hardness) + 0.5 * window + rng.normal(0, 0.5, N) - 2).astype(np.float32)[seen]
        p = (1 / (1 + np.exp(-margin))).astype(np.float32)
        guess = np.where(margin > 0, label[seen], (label[seen] + 1) % CLASSES)
        rows: dict[str, Any] = {
            "loss": -np.log(p), "target": label[seen], "margin": margin, "el2n": 1.2 * (1 - p), "entropy": 1.5 * (1 - p),
            "confidence": p, "guess": guess, "other": (label[seen] + 1) % CLASSES, "guess_p": np.maximum(p, 1 - p),
            "grad_norm": 2 * (1 - p),
        }  # fmt: skip
        ledger.record(seen, {name: np.asarray(row, dtype=np.float32) for name, row in rows.items()}, window=window)
    ledger.label[:] = label
    return ledger


def sample_reference() -> Reference:
    """The opinions of two other models on the samples of `sample_ledger`."""
    return reference_of([sample_ledger(seed=1), sample_ledger(seed=2).mean_loss], N)


def check_plugin(kind: str, plugin: str | Callable[..., Any], **options: Any) -> None:
    """Raise AssertionError with the reason unless the plug-in keeps the contract of its kind.

    Checks shape, type and range of the result; the same result for the same input; that arguments are unchanged; and a
    whole plan made with it, on a ledger with history and on an empty one.
    """
    checks = {"filters": _filter, "scores": _score, "samplers": _sampler, "curves": _curve}
    if kind not in checks:
        raise PluginError(f"There is no check for plug-ins of kind {kind!r}; there are {', '.join(checks)}.")
    found = plugin_of(kind, Use(name=plugin, options=options))
    assert summary(found.call), f"{kind} {plugin!r} has no docstring; its first line is what `salience plugins` shows"
    for ledger in (sample_ledger(), sample_ledger(windows=1), Ledger(N)):
        before = ledger.state_dict()
        try:
            checks[kind](found, ledger)
        except (PluginError, ConfigError) as cause:
            raise AssertionError(str(cause)) from cause
        _whole_plan(found, ledger)
        for name, column in before.items():
            np.testing.assert_array_equal(ledger[name], column, err_msg=f"the plug-in changed the ledger's {name}")


def _view(ledger: Ledger) -> View:
    return View(ledger, Clock(window=5, windows=WINDOWS, keep=0.4), sample_reference())


def _filter(plugin: Plugin, ledger: Ledger) -> None:
    first, second = (plugin(_view(ledger)) for _ in range(2))
    assert first.reason, "a Verdict says why (reason)"
    for name in ("keep", "force"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg="two calls differ")


def _score(plugin: Plugin, ledger: Ledger) -> None:
    first, second = (plugin(_view(ledger)) for _ in range(2))
    np.testing.assert_array_equal(first, second, err_msg="two calls differ")
    if ledger.seen.any():
        assert np.isfinite(first[ledger.seen > 0]).any(), "the score knows nothing of samples that were seen"


def _sampler(plugin: Plugin, ledger: Ledger) -> None:
    importance = ((np.random.default_rng(0).permutation(N) + 0.5) / N).astype(np.float32)
    have = Candidates(view=_view(ledger), ids=np.arange(N), importance=importance, raw_of_all=ledger.mean_loss.copy())
    first, second = (plugin(have, 90, np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(first.positions, second.positions, err_msg="equal generators, different draws")


def _curve(plugin: Plugin, ledger: Ledger) -> None:
    for windows in (1, 2, 5, 30, 300):
        for window in range(windows):
            plugin(Clock(window=window, windows=windows))


def _whole_plan(plugin: Plugin, ledger: Ledger) -> None:
    kind, used = plugin.kind, Use(name=plugin.call, options=plugin.options)
    config = SelectConfig(
        filters=(used,) if kind == "filters" else (),
        scores=(used,) if kind == "scores" else (Use(name="ema_loss"),),
        sampler=used if kind == "samplers" else Use(name="uniform"),
        keep=used if kind == "curves" else Use(name="constant", options={"share": 0.5}),
    )
    said: list[str] = []
    pipeline = Pipeline(config, reference=sample_reference(), warn=said.append)
    plans = [pipeline.plan(ledger, window=5, windows=WINDOWS, batch_size=16, seed=1) for _ in range(2)]
    columns = [COLUMNS[column] for column in plugin.card.needs if column in COLUMNS]
    known = all(not column.needs_logits or ledger.seen.any() for column in columns)
    assert not said or not known, f"the plug-in failed inside a pipeline: {said}"
    np.testing.assert_array_equal(plans[0].ids, plans[1].ids, err_msg="equal input, different plans")
    assert np.isfinite(plans[0].weights).all(), "weights must be finite"
