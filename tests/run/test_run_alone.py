"""A run, and the parts that stand between it and the outside, without a Loader: what each is asked, and what each saves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from salience.decide.auto import Auto
from salience.errors import DataError
from salience.events import EventLog
from salience.feed.dataset import SourceDataset
from salience.feed.options import ReadingOptions
from salience.feed.source import Source
from salience.ledger import Ledger
from salience.plan import Plan, Shard
from salience.run import Run
from salience.run.deciding import Deciding
from salience.run.feeding import Feeding
from salience.run.part import Batch, Setup, Voice
from salience.run.parts import Parts
from salience.run.planning import Planning
from salience.run.probing import Probing
from salience.run.staging import Staging
from salience.run.state import resume, saved
from salience.run.watching import Watching
from salience.treat.config import Treat
from salience.treat.stages import Stage, as_stages
from salience.treat.treating import Treating

N = 40
EVERYTHING = {
    "select": None, "seed": 3, "drop_last": False, "window": None, "generator": None, "ledger": None, "reference": None,
    "baseline": None, "embeddings": None, "trace": None, "log": None, "sinks": (), "strict": False,
}  # fmt: skip


def a_setup(**other) -> Setup:
    return Setup(**{"n": N, "batch_size": 8, "epochs": 2, "seed": 3, "drop_last": False, "ranks": None, **other})


def a_voice() -> Voice:
    return Voice(EventLog(), strict=False)


def a_plan(window: int = 0) -> Plan:
    ones = np.ones(N, dtype=np.float32)
    return Plan(
        window=window, population=N, batch_size=8, ids=np.arange(N), weights=ones, importance=ones.copy(),
        level=np.zeros(N, dtype=np.uint8),
    )  # fmt: skip


class Ids:
    """Makes batches of nothing but ids."""

    has_workers = keeps_workers = False

    def start(self, shard: Shard, done: frozenset[int]) -> Iterator[Batch]:
        for number in range(len(shard)):
            if number not in done:
                yield Batch(shard.plan.window, number, shard.ids(number), content=shard.ids(number))

    def peek(self, order: np.ndarray, size: int, seeds: torch.Tensor) -> Iterator[np.ndarray]:
        yield from np.split(order, range(size, len(order), size))


def a_run(**other) -> Run:
    return Run(Parts(N, batch_size=8, epochs=2, **{**EVERYTHING, **other}), Ids())


def window(run: Run, *, batches: int | None = None) -> list[np.ndarray]:
    found = []
    for batch in run.open():
        found.append(run.deliver(batch))
        run.loss(torch.from_numpy(found[-1] / N), None, None, None, again=False)
        run.take_back(batch)
        if len(found) == batches:
            break
    return found


def test_a_window_is_opened_delivered_and_closed_and_its_losses_are_known():
    run = a_run()
    seen = window(run)
    assert sorted(np.concatenate(seen)) == list(range(N))
    assert (run.course.complete, run.course.progress) == (True, 0.5)
    run.close()
    np.testing.assert_allclose(run.ledger.last_loss, np.arange(N) / N, rtol=1e-6)
    kinds = [event.kind for event in run.events.recent]
    assert kinds == ["run", "plan", "window"]
    assert run.epoch == 1


def test_a_run_that_was_saved_in_a_window_goes_on_with_the_rest_of_it():
    whole = a_run(select="uniform")
    wanted = [window(whole) for _ in range(2)]
    run = a_run(select="uniform")
    first = window(run, batches=1)
    again = a_run(select="uniform")
    resume(again, saved(run))
    rest = window(again)
    assert np.array_equal(np.concatenate([*first, *rest]), np.concatenate(wanted[0]))
    assert np.array_equal(np.concatenate(window(again)), np.concatenate(wanted[1]))
    np.testing.assert_array_equal(again.ledger.seen, whole.ledger.seen)


def test_every_part_is_asked_in_the_order_of_the_run():
    run, asked = a_run(), []
    for part in run.all_parts:
        for moment in ("prepare", "open", "hand_over", "close"):
            own = getattr(part, moment)
            setattr(
                part, moment, lambda *a, own=own, said=(moment, part.name), **k: (asked.append(said), own(*a, **k))[1]
            )
    run.choose_parts()
    window(run, batches=1)
    run.close()
    for moment in ("prepare", "open", "hand_over", "close"):
        names = [name for what, name in asked if what == moment]
        assert names == [part.name for part in run.parts if part.name in names], moment
    assert {what for what, _ in asked} == {"prepare", "open", "hand_over", "close"}


def test_watching_times_the_steps_of_a_window():
    watching = Watching()
    watching.open(a_plan().shard(), frozenset())
    for number in range(3):
        watching.steps.got({"load": 0.5})
        watching.steps.on_loss(torch.ones(1))
        watching.take_back(Batch(0, number, np.arange(8)))
    spent = watching.spent()
    assert spent["steps"].steps == 3
    assert spent["steps"].work == {"load": 1.5}
    assert spent["seconds"] > 0


def test_probing_looks_once_per_mark_and_says_what_it_found():
    voice = a_voice()
    probing = Probing(a_setup(), voice)
    assert not probing.in_use
    probing.attach(nn.Linear(4, 3), (torch.randn(12, 4), torch.arange(12) % 3))
    assert probing.in_use
    for metric in (0.2, 0.35, 0.38, 0.55):
        probing.evaluated(metric, 1)
    assert [event.data.accuracy for event in voice.events.recent] == [0.35, 0.55]
    again = Probing(a_setup(), voice)
    again.load_state_dict(probing.state_dict())
    assert again.state_dict() == probing.state_dict()


def a_source(folder, count: int = N) -> Source:
    for i in range(count):
        path = folder / str(i % 2) / f"{i:03d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]))
    return Source(str(folder), max_broken=0.05)


def test_feeding_names_each_broken_sample_once_and_stops_at_too_many(tmp_path):
    voice, source = a_voice(), a_source(tmp_path)
    feeding = Feeding(a_setup(), voice, SourceDataset(source, None), source.reading)
    ledger = Ledger(N)
    feeding.enter_index(ledger)
    np.testing.assert_array_equal(ledger.label, source.labels)
    feeding.open(a_plan().shard(), frozenset())
    for _ in range(2):
        feeding.hand_over(Batch(0, 0, np.arange(8), broken={3: "it is torn"}, counts={"samples": 8}))
    assert [(event["id"], event["reason"]) for event in voice.events.recent] == [(3, "it is torn")]
    assert source.stats.samples == 16
    again = Feeding(a_setup(), voice, SourceDataset(source, None), source.reading)
    again.load_state_dict(feeding.state_dict())
    assert again.broken == {3: "it is torn"}
    with pytest.raises(DataError, match=r"3 of 40 samples are broken, more than max_broken = 0\.05"):
        again.hand_over(Batch(0, 1, np.arange(8, 16), broken={0: "gone", 1: "gone"}))


def test_staging_says_how_each_sample_is_treated_and_goes_on_where_it_was():
    def staging() -> Staging:
        data = [torch.full((4,), float(i)) for i in range(N)]
        stages = as_stages([Stage(torch.sqrt, random=False), Stage(torch.rand_like, name="noise")])
        treating = Treating(data, stages, Treat("fresh"), seed=3, workers=0, ranks=None, windows=2)
        return Staging(a_voice(), Ledger(N), treating)

    first, second = staging(), staging()
    plan, _ = first.plan(a_plan(), {}, None)
    np.testing.assert_array_equal(plan.level, 0)
    first.open(plan.shard(), frozenset())
    treatment = first.treatment(slice(0, 8))
    assert treatment.split == 0
    np.testing.assert_array_equal(treatment.created, 0)
    second.load_state_dict(first.state_dict())
    assert second.report() == first.report()


def test_deciding_follows_the_log_of_an_earlier_run(tmp_path):
    class Workers:
        num_workers, ahead, restarts, options = 1, 2, True, {}

        def restart(self, workers: int, *, prefetch: int, pin: bool) -> None:
            self.num_workers = workers

    log, wanted = EventLog(tmp_path / "run.jsonl"), [1, 3, 2]
    for number, workers in enumerate(wanted):
        log.emit("settings", window=number, workers=workers, cache=0, treat=False, select=False)
    setup, voice, workers = a_setup(epochs=3), a_voice(), Workers()
    auto = Auto(tmp_path / "run.jsonl", None, epochs=3)
    source = Feeding(setup, voice, [0] * N, ReadingOptions())
    deciding = Deciding(
        setup, voice, auto, workers=workers, feeding=source, planning=Planning(setup, None, voice), staging=None,
        watching=Watching(),
    )  # fmt: skip
    auto.start(deciding.settings, 5)
    found = []
    for number in range(3):
        deciding.prepare(number, Ledger(N))
        deciding.open(a_plan(number).shard(), frozenset())
        deciding.close(finished=True)
        found.append(workers.num_workers)
    assert found == wanted
    assert [event["workers"] for event in voice.events.recent] == wanted
