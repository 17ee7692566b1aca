"""`salience demo`: the same training three ways, side by side, on images the demo renders itself.

    all data   every sample in every epoch
    shorter    uniform, with as many visits as salience makes and a schedule fitted to them: the honest control
    salience   select="default"

The arms take turns epoch by epoch, so that a noisy machine disturbs all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from salience.app.glyphs import Glyphs, render
from salience.app.models import build
from salience.loader import Loader
from salience.report import words
from salience.report.console import Bars, bars, say, table
from salience.schedule import one_cycle

BATCH_SIZE = 64
PEAK_LEARNING_RATE = 0.1


@dataclass(slots=True)
class DemoArm:
    """One way of training, and its cost."""

    name: str
    loader: Loader
    model: nn.Module
    budget: Callable[[], int]
    """Number of visits it may make, as far as is known now."""
    accuracy: float = 0.0
    visits: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list[float])

    @property
    def progress(self) -> float:
        return min(1.0, self.visits / self.budget())


def main(*, samples: int = 0, epochs: int = 0, seed: int = 0, quick: bool = False) -> int:
    """Run the demo; `quick` is a smoke test of a few seconds."""
    samples, epochs = samples or (1000 if quick else 10_000), epochs or (4 if quick else 12)
    begin = time.perf_counter()
    say(
        f"salience demo: {samples:,} rendered digits; 15% near-copies, 5% wrong labels, 10% hard ones (known, but not used).\n"
    )
    with bars() as shown:

        def rendered(done: int, total: int) -> None:
            shown.update("rendering", done, total)

        train = render(samples, seed=seed, progress=rendered)
        test = render(max(500, samples // 4), seed=seed, split="test", copies=0, wrong=0)
        arms = make_arms(train, epochs, seed)
        take_turns(arms, test, shown)
    show(arms, train, time.perf_counter() - begin)
    return 0


def make_arms(train: Glyphs, epochs: int, seed: int) -> list[DemoArm]:
    data = TensorDataset(torch.from_numpy(train.images), torch.from_numpy(train.labels))
    ours = Loader(data, BATCH_SIZE, epochs=epochs, select="default", seed=seed)

    def spent() -> int:
        return ours.visits_expected or 0

    def full() -> int:
        return epochs * len(data)

    plain = {"all data": full, "shorter": spent}
    arms = [
        DemoArm(name, Loader(data, BATCH_SIZE, seed=seed), _model(train, seed), budget)
        for name, budget in plain.items()
    ]
    return [*arms, DemoArm("salience", ours, _model(train, seed), spent)]


def _model(train: Glyphs, seed: int) -> nn.Module:
    """The same initial parameters for every arm; the caller's global generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build("cnn", int(train.labels.max()) + 1, channels=1, size=train.images.shape[1])


def take_turns(arms: list[DemoArm], test: Glyphs, shown: Bars) -> None:
    """Train an epoch of the arm that is furthest behind, until all are done."""
    turns = {arm.name: train_arm(arm, test) for arm in arms}
    while waiting := [arm for arm in arms if arm.name in turns]:
        # On a tie the last arm, salience, goes first: the shorter run spends what salience is known to spend.
        arm = min(reversed(waiting), key=lambda a: a.progress)
        if next(turns[arm.name], None) is None:
            del turns[arm.name]
        note = f"epoch loss {words.loss(arm.losses[-1])}" if arm.losses else ""
        if arm.accuracy:
            note += f"   accuracy {arm.accuracy:.2%}"
        shown.update(arm.name, arm.visits, arm.budget(), note)


def train_arm(arm: DemoArm, test: Glyphs) -> Generator[DemoArm]:
    """Train until the budget is spent, yielding after every epoch; the schedule runs over the budget."""
    optimizer = torch.optim.SGD(
        arm.model.parameters(), lr=PEAK_LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    while (left := arm.budget() - arm.visits) > 0:
        begin, total, count = time.perf_counter(), 0.0, 0
        arm.model.train()
        for x, y in arm.loader:
            x, y = x[:left], y[:left]
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LEARNING_RATE * one_cycle(arm.progress)
            logits = arm.model(to_input(x))
            losses = F.cross_entropy(logits, y, reduction="none")
            # A shorter run may end inside a batch; only whole batches are recorded.
            loss = arm.loader.loss(losses, logits, y) if len(x) == arm.loader.batch_len else losses.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            arm.visits += len(x)
            total, count = total + float(loss.detach()), count + 1
            if (left := arm.budget() - arm.visits) <= 0:
                break
        arm.losses.append(total / count)
        arm.seconds += time.perf_counter() - begin
        yield arm
    arm.accuracy = evaluate(arm.model, test)


@torch.no_grad()
def evaluate(model: nn.Module, test: Glyphs) -> float:
    model.eval()
    labels = torch.from_numpy(test.true_labels)
    guesses = [model(to_input(part)).argmax(1) for part in torch.from_numpy(test.images).split(500)]
    return (torch.cat(guesses) == labels).float().mean().item()


def to_input(x: Tensor) -> Tensor:
    """uint8 [B, H, W] to float [B, 1, H, W] around zero."""
    return x.unsqueeze(1).float() / 127.5 - 1


def show(arms: list[DemoArm], train: Glyphs, seconds: float) -> None:
    rows = [
        (
            arm.name,
            f"{arm.accuracy:.2%}",
            f"{arm.visits:,}",
            f"{arm.seconds:.1f}",
            f"{arm.loader.watch.total / arm.seconds:.1%}",
        )
        for arm in arms
    ]
    say()
    head = ("arm", "accuracy", "sample visits", "seconds", "salience overhead")
    table("Clean test accuracy and what it cost", head, rows)
    say(f"\n{verdict(*arms)}")
    found = _observed(arms[0], train)
    say(
        f"{found}\nThe whole demo took {seconds:.0f} s. Next: README.md, or `salience train --help` for your own images."
    )


def verdict(full: DemoArm, shorter: DemoArm, ours: DemoArm) -> str:
    """One sentence, honest if salience lost."""
    saved = 1 - ours.visits / full.visits
    against_full = 100 * (ours.accuracy - full.accuracy)
    against_shorter = 100 * (ours.accuracy - shorter.accuracy)
    won = "beat" if against_shorter > 0 else ("tied with" if against_shorter == 0 else "LOST to")
    return (
        f"Verdict: with {saved:.0%} fewer visits ({full.seconds / ours.seconds:.2f}x less time) salience was "
        f"{against_full:+.2f} points from all data and {won} the equally short uniform run by "
        f"{abs(against_shorter):.2f} points (one seed; differences under about 0.5 are noise)."
    )


def _observed(arm: DemoArm, train: Glyphs) -> str:
    """What observing alone found out, compared with the truth that the demo knows."""
    ledger = arm.loader.ledger
    worst = (-ledger.mean_loss).argsort()[: int(train.wrong.sum())]
    share = train.wrong[worst].mean() if len(worst) else 0.0
    return (
        f"Observing alone: of the {len(worst):,} samples with the highest loss, {share:.0%} are wrong labels the demo "
        f"planted (by chance it would be {train.wrong.mean():.0%})."
    )
