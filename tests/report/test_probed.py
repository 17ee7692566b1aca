"""What probes of gradients found is drawn and said on the page."""

from __future__ import annotations

from dataclasses import replace

from salience.events import EventLog, GradientsProbed, LayerNearZero
from salience.report import drawings
from salience.report.html import page
from salience.report.reader import Log, story_of

LAYERS = (
    LayerNearZero(name="conv", entries=90, easiest=0.9, hardest=0.1),
    LayerNearZero(name="head", entries=10, easiest=0.5, hardest=0.0),
)
PROBE = GradientsProbed(
    window=3, accuracy=0.85, samples=256, mean_loss=0.5, losses=(0.1, 0.9), shares=(0.8, 0.2), layers=LAYERS,
    learnt_loss=0.05,
)  # fmt: skip


def the_story(*probes: GradientsProbed):
    log = EventLog()
    log.emit("run", population=10, batch_size=2, epochs=2)
    for one in probes:
        log.emit(one)
    read = Log(events=tuple(log.recent))
    return story_of(read, name="x")


def test_the_curve_has_a_line_per_probe_and_the_layers_are_those_of_the_last():
    story = the_story(replace(PROBE, accuracy=0.3, losses=(0.9, 1.5)), PROBE)
    curve, layers = drawings.near_zero_by_loss(story), drawings.near_zero_by_layer(story)
    assert curve.legend == ("at 30%", "at 85%")
    assert curve.rows == (("0.1", "-", "80%"), ("0.9", "80%", "20%"), ("1.5", "20%", "-"))
    assert layers.rows == (("conv", "90%", "10%"), ("head", "50%", "0%"))


def test_the_page_says_the_loss_under_which_samples_teach_hardly_anything():
    assert "under a loss of 0.05 (0.1 times the mean)" in page(the_story(PROBE))
    assert "no sample of the probe" in page(the_story(replace(PROBE, learnt_loss=None)))
    assert "Loss and gradient" not in page(the_story())
