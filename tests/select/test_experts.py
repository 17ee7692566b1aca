"""A mixture of experts: the gate weighs what foretells other networks, silences what does not, and adds up what is news."""

from __future__ import annotations

import numpy as np
import pytest

from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.select import Clock, View
from salience.select.agreement import auroc
from salience.select.experts import (
    EXPERTS,
    errors_of,
    families_of,
    logit_ranks,
    mixture_of,
    news,
    panel,
    weights_of,
)
from salience.select.noise import Judgement

N = 3000
ODDS = ("odds",)


def network(wrong: np.ndarray, noise: float, seed: int, classes: int = 4) -> Ledger:
    """What a network says of samples whose label is wrong where `wrong`: sure of the true class but for `noise`."""
    rng = np.random.default_rng(seed)
    ledger, label = Ledger(len(wrong)), np.arange(len(wrong)) % classes
    true = np.where(wrong, (label + 1) % classes, label)
    logits = 2.0 * np.eye(classes)[true] + noise * rng.normal(size=(len(wrong), classes))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    ledger.set_labels(label)
    for window in range(3):
        order = np.argsort(-p, axis=1)
        own, at = p[np.arange(len(p)), label], np.arange(len(p))
        margin = np.log(own) - np.log(np.where(order[:, 0] == label, p[at, order[:, 1]], p[at, order[:, 0]]))
        rows = {
            "loss": -np.log(own), "target": label, "margin": margin, "el2n": 1 - own, "entropy": -own * np.log(own),
            "confidence": own, "guess": order[:, 0], "other": order[:, 1], "guess_p": p[at, order[:, 0]],
        }  # fmt: skip
        rows |= {f"p_{k}": p[at, order[:, k]] for k in range(4)} | {f"class_{k}": order[:, k] for k in range(4)}
        ledger.record(at, {name: row.astype(np.float32) for name, row in rows.items()}, window=window)
    return ledger


@pytest.fixture(scope="module")
def wrong() -> np.ndarray:
    return np.random.default_rng(0).random(N) < 0.2


def test_weights_foretell_the_target_and_are_never_negative():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4000, 3))
    target = 1 / (1 + np.exp(-(2 * x[:, 0] - 1.0 * x[:, 1] - 1)))
    found = weights_of(x, target, prior=np.zeros(3), pull=0.0)
    assert found[0] == pytest.approx(1.5, abs=0.5)
    assert found[1] == 0, "an expert that points the other way is silenced, not turned round"
    assert found[2] == pytest.approx(0, abs=0.1)
    pulled = weights_of(x, target, prior=np.array([0.0, 0.0, 1.0]), pull=100.0)
    np.testing.assert_allclose(pulled, [0, 0, 1], atol=0.01)


def test_one_column_weighs_as_logistic_regression_by_hand():
    # Half of the samples at +1 with target 3/4, half at -1 with 1/4: the weight is log(3), the intercept 0.
    x = np.repeat([[1.0], [-1.0]], 50, axis=0)
    assert weights_of(x, np.where(x[:, 0] > 0, 0.75, 0.25), prior=np.zeros(1), pull=0.0)[0] == pytest.approx(np.log(3))


def test_networks_that_agree_beyond_the_first_get_less_of_a_voice():
    rng = np.random.default_rng(2)
    truth, shared = rng.normal(size=(2, 5000))
    first = truth + rng.normal(size=5000)
    apart = [truth + rng.normal(size=5000) for _ in range(2)]
    alike = [0.3 * truth + 3 * shared + 0.5 * rng.normal(size=5000) for _ in range(2)]
    equal = [0.1, 0.1, 0.1]
    assert news([first, *alike], equal)[1] < 0.1 < 0.3 < news([first, *apart], equal)[1] <= 0.5
    assert news([first], [0.1]) == [1.0]
    assert news([first, apart[0]], [0.1, 0.1]) == [1.0, 1.0]


def test_networks_that_err_more_often_weigh_less_by_the_square_and_better_ones_not_more():
    voices = list(np.random.default_rng(3).normal(size=(2, 100)))
    assert news(voices, [0.1, 0.2]) == pytest.approx([1, 0.25])
    assert news(voices, [0.2, 0.1]) == [1.0, 1.0]


def test_how_often_a_network_errs_is_read_from_the_labels_less_those_that_are_wrong(wrong):
    sure, unsure = network(wrong, 0.3, 0), network(wrong, 2.5, 1)
    found = errors_of({"sure": sure, "unsure": unsure})
    truth = [
        float((of.vote[:, 0] != np.where(wrong, (of.label + 1) % 4, of.label))[~wrong].mean()) for of in (sure, unsure)
    ]
    assert found[0] == pytest.approx(max(0.02, truth[0]), abs=0.02)
    assert found[1] == pytest.approx(truth[1], abs=0.06), "a little low: it confirms some wrong labels by chance"


def test_a_model_that_learnt_its_labels_by_heart_is_not_taken_for_a_better_one(wrong):
    none = np.zeros(N, dtype=bool)
    model, trained, held_out = network(none, 0.1, 0), network(none, 0.1, 1), network(wrong, 1.5, 2)
    assert errors_of({"model": model})[0] == 0.02
    errors = errors_of({"model": model, "jury": trained, "jury, held out": held_out})
    assert errors[0] == pytest.approx(errors[2])
    assert errors[1] == errors[2] > 0.2


def test_logits_of_ranks_are_0_in_the_middle_and_where_nothing_is_known():
    np.testing.assert_allclose(logit_ranks(np.array([5.0, np.nan, 1.0, 3.0])), [np.log(5), 0, -np.log(5), 0], atol=1e-6)


def test_three_networks_find_wrong_labels_better_than_the_best_of_them(wrong):
    each = {f"net {i}": network(wrong, 1.5, i) for i in range(3)}
    mixed = mixture_of(each)
    best = max(auroc(EXPERTS["odds"](of), wrong) for of in each.values())
    assert auroc(mixed.logit, wrong) > best + 0.01


def test_an_expert_that_knows_nothing_is_silenced_by_the_gate(wrong):
    each = {f"net {i}": network(wrong, 1.5, i) for i in range(3)}
    for ledger in each.values():
        ledger.var_loss[:] = np.random.default_rng(5).random(N)
    said = mixture_of(each, experts=("odds", "loss", "variance")).weights["net 0"]
    assert said["odds"] > 0.3
    assert said["variance"] < 0.02


def test_one_expert_of_one_network_is_that_expert(wrong):
    ledger = network(wrong, 1.5, 0)
    for name in EXPERTS:
        mixed = mixture_of({"model": ledger}, experts=(name,))
        assert mixed.weights == {"model": {name: 0.6}}
        given = np.argsort(logit_ranks(EXPERTS[name](ledger)), kind="stable")
        np.testing.assert_array_equal(np.argsort(mixed.logit, kind="stable"), given)


def test_three_sigma_counts_standard_deviations_over_the_mean_of_the_class():
    ledger = Ledger(4)
    ledger.set_labels([0, 0, 1, 1])
    ledger.record(np.arange(4), {"loss": np.array([1.0, 3.0, 10.0, 10.0], dtype=np.float32)}, window=0)
    np.testing.assert_allclose(EXPERTS["three_sigma"](ledger), [-1, 1, 0, 0], atol=1e-3)


def test_unknown_experts_are_named():
    with pytest.raises(ConfigError, match="no expert 'lose'"):
        mixture_of({"model": Ledger(3)}, experts=("lose",))
    with pytest.raises(ConfigError, match="at least one expert"):
        mixture_of({"model": Ledger(3)}, experts=())


def test_the_panel_leaves_out_what_the_networks_call_wrong_and_says_their_weights(wrong):
    model, jury = network(wrong, 1.5, 0), (network(wrong, 1.5, 1), network(wrong, 1.5, 2))
    judged = Judgement(
        wrong=np.full(N, 0.2, dtype=np.float32), verdict="wrong labels", rate=0.2, evidence="so", firm=True,
        spared=np.zeros(N, dtype=bool),
    )  # fmt: skip
    clock = Clock(window=5, windows=10)
    assert set(families_of(View(model, clock))) == {"model"}
    said = panel(View(model, clock, judged=judged, jury=jury))
    left = ~said.keep
    assert wrong[left].mean() > 0.8
    assert left.sum() > 0.6 * wrong.sum()
    assert "experts: model 1.00 (odds 0.60); jury 0." in said.reason
    alone = panel(View(model, clock, judged=judged))
    assert wrong[left].mean() > wrong[~alone.keep].mean()


def test_where_there_are_no_wrong_labels_the_panel_says_what_noise_says(wrong):
    none = np.zeros(N, dtype=bool)
    view = View(network(none, 1.0, 0), Clock(window=5, windows=10))
    said = panel(view)
    assert said.keep is None
    assert "experts" not in said.reason
