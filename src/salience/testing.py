"""The conformance kit: what every plug-in must do, ours and yours.

from salience.testing import check_plugin
def test_my_score(): check_plugin("scores", my_score)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from salience.config import SelectConfig, Use
from salience.errors import PluginError
from salience.ledger import COLUMNS, Ledger
from salience.registry import card_of, find, summary
from salience.select.pipeline import Pipeline
from salience.select.reference import reference_of
from salience.select.view import Candidates, Clock, Draw, Reference, Verdict, View

N, CLASSES, WINDOWS = 240, 6, 12


def sample_ledger(*, windows: int = 4, seed: int = 0) -> Ledger:
    """A ledger as training leaves it: classes, some samples hard, some labels wrong, the last 10 never seen."""
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
    """Two other models' opinion on the samples of `sample_ledger`."""
    return reference_of([sample_ledger(seed=1), sample_ledger(seed=2).mean_loss], N)


def check_plugin(kind: str, plugin: str | Callable[..., Any], **options: Any) -> None:
    """Raise AssertionError, saying what is wrong, unless the plug-in keeps the contract of its kind.

    Shape, type and range of the result; the same result for the same input; nothing it was given changed;
    a whole plan made with it, on a ledger with history and on an empty one.
    """
    call = find(kind, plugin)
    assert summary(call), f"{kind} {plugin!r} has no docstring; its first line is what `salience plugins` shows"
    checks = {"filters": _filter, "scores": _score, "samplers": _sampler, "curves": _curve}
    if kind not in checks:
        raise PluginError(f"There is no check for plug-ins of kind {kind!r}; there are {', '.join(checks)}.")
    for ledger in (sample_ledger(), sample_ledger(windows=1), Ledger(N)):
        before = ledger.state_dict()
        checks[kind](call, ledger, options)
        _whole_plan(kind, call, ledger, options)
        for name, column in before.items():
            np.testing.assert_array_equal(ledger[name], column, err_msg=f"the plug-in changed the ledger's {name}")


def _view(ledger: Ledger, keep: float = 0.4) -> View:
    return View(ledger, Clock(window=5, windows=WINDOWS, keep=keep), sample_reference())


def _filter(call: Callable[..., Any], ledger: Ledger, options: dict[str, Any]) -> None:
    first, second = (call(_view(ledger), **options) for _ in range(2))
    assert isinstance(first, Verdict), f"a filter returns a Verdict, not {type(first).__name__}"
    assert first.reason, "a Verdict says why (reason)"
    for name in ("keep", "force"):
        mask = getattr(first, name)
        if mask is not None:
            assert mask.shape == (N,), f"Verdict.{name} has shape {mask.shape}, wanted {(N,)}"
            assert mask.dtype == np.bool_, f"Verdict.{name} is {mask.dtype}, wanted bool"
            np.testing.assert_array_equal(mask, getattr(second, name), err_msg="two calls differ")


def _score(call: Callable[..., Any], ledger: Ledger, options: dict[str, Any]) -> None:
    first, second = (np.asarray(call(_view(ledger), **options)) for _ in range(2))
    assert first.shape == (N,), f"a score has one number per sample, got shape {first.shape}"
    assert first.dtype.kind in "fiu", f"a score is a number, got {first.dtype}"
    np.testing.assert_array_equal(first, second, err_msg="two calls differ")
    if ledger.seen.any():
        assert np.isfinite(first[ledger.seen > 0]).any(), "the score knows nothing of samples that were seen"


def _sampler(call: Callable[..., Any], ledger: Ledger, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    importance = ((rng.permutation(N) + 0.5) / N).astype(np.float32)
    have = Candidates(view=_view(ledger), ids=np.arange(N), importance=importance, raw_of_all=ledger.mean_loss.copy())
    first, second = (call(have, 90, np.random.default_rng(7), **options) for _ in range(2))
    assert isinstance(first, Draw), f"a sampler returns a Draw, not {type(first).__name__}"
    np.testing.assert_array_equal(first.positions, second.positions, err_msg="equal generators, different draws")
    positions = first.positions
    assert len(np.unique(positions)) == len(positions), "a sample was drawn twice"
    assert not len(positions) or (positions.min() >= 0 and positions.max() < N), "a position is out of range"
    card = card_of(call)
    if card.exact:
        assert len(positions) == 90, (
            f"drew {len(positions)} for a budget of 90; say @card(exact=False) if that is meant"
        )
    if card.unbiased:
        assert first.inclusion is not None, "an unbiased sampler states its inclusion probabilities"
    if first.inclusion is not None:
        assert first.inclusion.shape == positions.shape, "one inclusion probability for each sample drawn"
        assert ((first.inclusion > 0) & (first.inclusion <= 1 + 1e-6)).all(), "probabilities lie in (0, 1]"


def _curve(call: Callable[..., Any], ledger: Ledger, options: dict[str, Any]) -> None:
    for windows in (1, 2, 5, 30, 300):
        for window in range(windows):
            share = call(Clock(window=window, windows=windows), **options)
            assert 0 < share <= 1, f"share {share} at window {window} of {windows}; allowed: (0, 1]"


def _whole_plan(kind: str, call: Callable[..., Any], ledger: Ledger, options: dict[str, Any]) -> None:
    used = Use(name=call, options=options)
    config = SelectConfig(
        filters=(used,) if kind == "filters" else (),
        scores=(used,) if kind == "scores" else (Use(name="ema_loss"),),
        sampler=used if kind == "samplers" else Use(name="uniform"),
        keep=used if kind == "curves" else Use(name="constant", options={"share": 0.5}),
    )
    said: list[str] = []
    pipeline = Pipeline(config, reference=sample_reference(), warn=said.append)
    plans = [pipeline.plan(ledger, window=5, windows=WINDOWS, batch_size=16, seed=1) for _ in range(2)]
    columns = [COLUMNS[column] for column in card_of(call).needs if column in COLUMNS]
    known = all(not column.needs_logits or ledger.seen.any() for column in columns)
    assert not said or not known, f"the plug-in failed inside a pipeline: {said}"
    np.testing.assert_array_equal(plans[0].ids, plans[1].ids, err_msg="equal input, different plans")
    assert np.isfinite(plans[0].weights).all(), "weights must be finite"
