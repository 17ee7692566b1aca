"""What other models think of the samples: where it comes from, and the scores that read it."""

from __future__ import annotations

import numpy as np
import pytest

import salience
from salience.errors import ConfigError, StateError
from salience.ledger import Ledger, save
from salience.select import Clock, Pipeline, View, preset
from salience.select.reference import reference_of
from salience.select.scores import cscore, proxy, rho


def ledger_of(*losses: list[float]) -> Ledger:
    """A ledger that saw these losses, one list a window."""
    ledger = Ledger(len(losses[0]))
    for window, row in enumerate(losses):
        ledger.record(np.arange(ledger.n), {"loss": np.array(row, dtype=np.float32)}, window=window)
    return ledger


def view(ledger: Ledger, reference) -> View:
    return View(ledger, Clock(window=3, windows=10), reference_of(reference, ledger.n))


def test_rho_is_the_last_loss_less_that_of_the_other_model():
    # Sample 0 is learnt, 1 is hard here and easy there (worth a visit), 2 is hard for both (a wrong label, say).
    seen = view(ledger_of([1.0, 1.0, 1.0], [0.1, 2.0, 3.0]), [0.0, 0.5, 2.75])
    np.testing.assert_allclose(rho(seen), [0.1, 1.5, 0.25], rtol=1e-6)
    np.testing.assert_allclose(proxy(seen), [0.0, 0.5, 2.75])


def test_what_the_other_model_does_not_know_is_nan():
    seen = view(ledger_of([1.0, 1.0, 1.0]), [0.5, float("nan"), float("inf")])
    assert np.isnan(seen.reference).tolist() == [False, True, True]
    assert np.isnan(rho(seen)).tolist() == [False, True, True]


def test_the_c_score_counts_how_seldom_a_sample_was_right():
    ledger = ledger_of([1.0, 1.0, 1.0])
    ledger.guess[:], ledger.seen[:], ledger.right[:] = 0, 3, [0, 2, 2]
    ledger.confidence[:] = [0.2, 0.8, 0.4]
    # 1 - (0 + .2) / 4 = .95,  1 - 2.8 / 4 = .3,  1 - 2.4 / 4 = .4: ranks 5/6, 1/6, 3/6
    np.testing.assert_allclose(cscore(view(Ledger(3), ledger)), [5 / 6, 1 / 6, 3 / 6], rtol=1e-6)


def test_networks_of_different_loss_scales_vote_equally():
    small, large = [0.3, 0.2, 0.1, 0.4], [100.0, 200.0, 300.0, 400.0]
    # ranks (k + 1/2) / 4: [5, 3, 1, 7] / 8 and [1, 3, 5, 7] / 8; by losses alone the second would decide
    np.testing.assert_allclose(cscore(view(Ledger(4), [small, large])), [3 / 8, 3 / 8, 3 / 8, 7 / 8])


def test_a_sample_one_network_never_saw_is_judged_by_the_other():
    nan = float("nan")
    np.testing.assert_allclose(view(Ledger(3), [[1.0, nan, 3.0], [3.0, 5.0, nan]]).reference, [2.0, 5.0, 3.0])


def test_ledgers_files_folders_and_arrays_mean_the_same(tmp_path):
    ledger = ledger_of([1.0, 2.0, 0.5])
    save(ledger, tmp_path / "ledger.npz")
    for source in (
        ledger,
        tmp_path,
        str(tmp_path / "ledger.npz"),
        [1.0, 2.0, 0.5],
        np.array([1.0, 2.0, 0.5]),
        [ledger],
    ):
        found = reference_of(source, 3)
        np.testing.assert_allclose(found.loss, [1.0, 2.0, 0.5])
        np.testing.assert_allclose(found.hardness, [3 / 6, 5 / 6, 1 / 6], rtol=1e-6)
        assert not found.loss.flags.writeable


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([1.0, 2.0], "has 2 samples, the data set 3"),
        ([[1.0, 2.0, 3.0], [1.0, 2.0]], "has 2 samples, the data set 3"),
        (np.zeros((3, 2)), r"shape \(3, 2\)"),
        (np.array(["a", "b", "c"]), "one loss per sample"),
        (Ledger(3), "knows the loss of no sample"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(source, says):
    with pytest.raises(ConfigError, match=says):
        reference_of(source, 3)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(StateError, match=r"holds no ledger\.npz"):
        reference_of(tmp_path, 3)


@pytest.mark.parametrize("name", ["rho", "proxy", "coarse_to_fine"])
def test_a_rule_without_its_signal_names_both_ways_out_at_the_first_step(name):
    selector = salience.Selector(10, epochs=3, select=name)
    with pytest.raises(ConfigError, match=r"pass reference=.*loader\.attach\(model, proxy="):
        next(iter(selector))


def test_a_plug_in_without_a_card_is_told_too():
    def nosy(view):
        return view.reference

    selector = salience.Selector(10, epochs=3, select={"preset": "uniform", "scores": [nosy]})
    with pytest.raises(ConfigError, match="pass reference="):
        next(iter(selector))


def test_a_resumed_run_wants_the_same_reference():
    state = salience.Selector(4, epochs=3, select="rho", reference=[1.0, 2, 3, 4]).state_dict()
    salience.Selector(4, epochs=3, select="rho", reference=[1.0, 2, 3, 4]).load_state_dict(state)
    with pytest.raises(StateError, match="same reference="):
        salience.Selector(4, epochs=3, select="rho", reference=[1.0, 2, 3, 5]).load_state_dict(state)


def test_a_plan_is_a_pure_function_of_the_reference_too():
    def ids(losses):
        pipeline = Pipeline(preset("proxy"), reference=reference_of(losses, 100))
        return pipeline.plan(Ledger(100), window=3, windows=9, batch_size=10, seed=0).ids.tolist()

    assert ids(np.arange(100)) == ids(np.arange(100))
    assert set(ids(np.arange(100))) == set(range(50, 100))
    assert set(ids(-np.arange(100))) == set(range(50))


def test_the_report_of_a_run_with_a_reference_forecasts_with_it():
    selector = salience.Selector(20, batch_size=5, epochs=3, select="proxy", reference=np.arange(20.0))
    assert selector.summary()["forecast"]["visits"] == 30
