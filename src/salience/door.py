"""The common part of both front doors: losses, progress, reports and state of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from salience.config import SelectConfig
from salience.errors import LossError, MissingExtra, StateError
from salience.events import EventLog
from salience.ledger import Ledger
from salience.ledger.compiled import register, weighted_sum
from salience.ledger.copies import Copies
from salience.ledger.history import History
from salience.plan import Plan
from salience.run import Run, telling
from salience.run.iterating import BatchIterator
from salience.run.losses import Targets
from salience.run.sensing import MakeScorer
from salience.run.state import resume, saved
from salience.run.tokens import NO_CLASS_PER_TOKEN, one_per_token, packed_means, token_means
from salience.select.presets import preset_name
from salience.signals.ghost import Extent
from salience.signals.jury import Juror
from salience.watch import Steps, Stopwatch
from salience.watch.probe import Probe

if TYPE_CHECKING:
    from salience.report.words import Names, SampleNames


class Door:
    """The public interface of a run that `Loader` and `Selector` share."""

    def __init__(self, run: Run, make_scorer: MakeScorer | None = None) -> None:
        self._run, self._make_scorer = run, make_scorer
        self._handle = register(run)
        if run.planning.lacks_baseline:
            run.voice.warn(
                'keep = "auto" has no baseline and stays at its default curve; pass baseline= the event log(s) of earlier '
                "runs that called loader.evaluated(metric)."
            )

    # --- iterating ---

    def __iter__(self) -> BatchIterator:
        """An iterator over the batches of the next epoch, which is used up once a batch is taken from it."""
        return BatchIterator(self._run)

    def __len__(self) -> int:
        """Batches of the epoch in progress, or of the next one; exact after iter(), if an epoch is planned at once."""
        return len(self._run)

    # --- losses ---

    def loss(
        self,
        losses: Tensor,
        logits: Tensor | None = None,
        targets: Targets | None = None,
        ids: Tensor | None = None,
        *,
        again: bool = False,
        counts: Tensor | None = None,
        total: Tensor | float | None = None,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Record per-sample losses and return their weighted mean, sum(w * l) / B.

        With `logits` [B, C] and integer `targets` [B], the ledger also learns margins, guesses and more. `targets` may also be
        one-hot or probabilities [B, C], zeros and ones with a single logit per sample, or (targets, targets of the partners,
        share) after mixup. A sample whose target names no class (`ignore_index`) is recorded by its loss alone. Over several
        ranks the result is sum(w * l) * world / B_global, so that DDP's mean over ranks is the gradient of the whole batch.
        Nothing here waits for the device. Where `select` says so (selective_backprop) and the loop has not called `pick`,
        the mean is over the samples picked here.

        Each batch has one loss, in the order of delivery; a loop that fetches ahead passes the `ids` that came with the
        batch. `again=True` allows a second loss for the same batch. Inside a step compiled by `torch.compile` it is one
        operator of the graph.

        If each loss is the mean of `counts` [B] items (tokens), every item has the same weight. If gradients are accumulated
        over batches that may differ in size, `total` is the number of items (without `counts`: of samples) of the whole step,
        over all its batches and ranks: the result is sum(w * l * counts) * world / total, to be added up and not averaged.

        With `mask` [B, T] the losses are those of tokens, [B, T]: the ledger records the mean of each sample over the tokens
        that the mask names, and every token has the same weight (or that of the mask, if it is not zeros and ones). Where
        samples are packed into rows, `segments` [R, T] has the position of each token's sample in the batch, -1 for none.
        """
        if is_compiling():
            if ids is not None or counts is not None or total is not None or mask is not None or segments is not None:
                raise LossError(
                    "loss() inside a compiled step takes no ids=, counts=, total=, mask= or segments=; call it outside, "
                    "or drop them."
                )
            if not isinstance(targets, Tensor | None):
                raise LossError("loss() inside a compiled step takes no mixed targets; call it outside.")
            return weighted_sum(losses, logits, targets, self._handle)
        if segments is not None:
            size = self.batch_len if ids is None else len(ids)
            losses, counts = packed_means(losses, segments, mask, counts, count=size)
        elif mask is not None:
            losses, counts = token_means(losses, mask, counts)
        if one_per_token(targets, mask if segments is None else segments):
            self._run.voice.warn_once(NO_CLASS_PER_TOKEN)
            logits = targets = None
        return self._run.loss(losses, logits, targets, ids, again=again, counts=counts, total=total)

    def skip(self) -> None:
        """Declare that the most recent batch gets no loss, on purpose."""
        self._run.recording.skip()

    def pick(
        self,
        losses: Tensor,
        logits: Tensor | None = None,
        targets: Targets | None = None,
        *,
        share: float | None = None,
        power: float | None = None,
    ) -> Tensor:
        """Choose after the forward pass: positions of round(share * B) samples of this batch, int64, on its device.

        Samples that are hard among recent losses are likelier: P ~ percentile^power (selective backprop). `share` defaults to
        that of `select`, or a half; `power` to 1 / share - 1, with which percentile^power is `share` on average. All samples
        count as seen; those later passed to `loss(losses[keep], ...)` count as trained. Seeded by (seed, step).
        """
        return self._run.pick(losses, logits, targets, share=share, power=power)

    def weights(self, ids: Tensor | None = None) -> Tensor:
        """Loss weights of the most recent batch, or of the one with these `ids`, float32 [B]; `loss` applies them itself."""
        return self._run.recording.weights(ids)

    def resize(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] at the size of this window, with treat="resolution"; batches of a Loader have it already."""
        resizing = self._run.resizing
        return images if resizing is None else resizing.resize(images)

    def relabelled(self, targets: Tensor, ids: Tensor | None = None) -> Tensor:
        """The batch's targets, with suspected ones replaced by the model's class. Nothing is relabelled unless you use this.

        Compute the loss from the result, and pass the targets as delivered to `loss()`.
        """
        return self._run.recording.relabelled(targets, ids)

    # --- the model, and validation results ---

    def attach(
        self,
        model: nn.Module,
        *,
        grad_norm: Extent | None = None,
        every: int = 1,
        features: bool = False,
        proxy: nn.Module | None = None,
        proxy_optimizer: torch.optim.Optimizer | None = None,
        background: torch.device | str | bool | Path = False,
        jury: Sequence[Juror] | None = None,
        probe: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Enable scores that need the model, by hooks on its layers. Call it again after a resume, since no state has them.

        Norms of per-sample gradients go into the ledger (`grad_norm`) when a plug-in reads them or `grad_norm` says
        how: "all" is exact over every Linear and Conv2d; "auto" takes them from the last one backwards within a tenth
        of the step's operations; "last" takes the last one, which bounds the others up to a factor; a model without any
        is judged by the gradient of its output. Other layers (norms, embeddings, packed attention weights) are not
        included; the `signals` event names them. `every` = k computes norms in one of k steps. `features` keeps the input
        of the last Linear.

        `proxy` is a small model that `loss(losses, logits, targets)` trains on the same inputs (the first tensor that `model`
        receives) and targets, by `proxy_optimizer` (default: SGD, learning rate 0.01, momentum 0.9); if there is no
        `reference=`, its losses are used as reference. `background` (True, or a device other than the CPU) scores unpicked
        samples in a process beside the training, so that what is known about them does not age; a Path is a folder through
        which a process elsewhere does so (`salience score`, `salience.signals.remote.answer`).

        `jury` is two small models (or (model, optimizer) pairs), each trained like a proxy, but only on its own half of the
        samples: with their opinions on every sample, the filter `panel` finds wrong labels by several networks.

        `probe` is (inputs, targets) of up to 256 samples. When `evaluated(accuracy)` passes a mark (30%, 40%, ...), the
        gradient of each of them is computed in eval mode: an event says how much of it is near zero, layer by layer, and
        below which loss nearly all of it is, which `threshold` with above="auto" then uses.
        """
        run = self._run
        if run.balancing is not None:
            run.balancing.attach(model)
        kept = run.copying.want_features(observing=features and run.planning.pipeline is None)
        searching = run.copying.search is not None
        run.sensing.attach(
            model, grad_norm=grad_norm or ("auto" if run.planning.reads("grad_norm") else None), every=every,
            takes_features=features or searching, features=kept, proxy=proxy,
            proxy_optimizer=proxy_optimizer, background=background, make_scorer=self._make_scorer, jury=jury,
        )  # fmt: skip
        if probe is None:
            run.probing.detach()
        else:
            run.probing.attach(model, probe)
        run.choose_parts()

    def detach(self) -> None:
        """Remove the hooks of `attach` from the model, and release the proxy and the background scorer."""
        self._run.sensing.detach()
        self._run.probing.detach()
        self._run.choose_parts()

    def evaluated(self, metric: float, **more: float) -> None:
        """Report a validation result, higher is better; it goes into the event log and steers keep = "auto"."""
        self._run.evaluated(float(metric), more)

    # --- how far, and what is known ---

    @property
    def n(self) -> int:
        """Number of samples in the data set."""
        return self._run.setup.n

    @property
    def batch_size(self) -> int:
        """Samples per batch on each rank."""
        return self._run.setup.rank_batch

    @property
    def epochs(self) -> int | None:
        """Passes over the data; of a run that is counted in `steps`, as many as these are expected to take."""
        return self._run.setup.epochs

    @property
    def seed(self) -> int:
        return self._run.setup.seed

    @property
    def drop_last(self) -> bool:
        return self._run.setup.drop_last

    @property
    def rank(self) -> int:
        return self._run.setup.rank

    @property
    def world(self) -> int:
        return self._run.setup.world

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the next one between two epochs."""
        return self._run.epoch

    def set_epoch(self, epoch: int) -> None:
        """Accepted for frameworks that call it before every epoch, and checked: the run counts its epochs itself."""
        self._run.set_epoch(epoch)

    @property
    def progress(self) -> float:
        """From 0 to 1 over the whole run, in sample visits (with `steps`, in batches); needs `epochs` or `steps`."""
        return self._run.course.progress

    @property
    def visits(self) -> int:
        """Number of sample visits made so far, over all ranks."""
        return self._run.course.visits

    @property
    def visits_expected(self) -> int | None:
        """Sample visits of the whole run, over all ranks, as far as they can be known now; None without `epochs` or `steps`."""
        return self._run.course.visits_expected

    @property
    def total_steps(self) -> int | None:
        """Number of batches of the whole run on each rank, or None if a plug-in decides during the run."""
        return self._run.planning.total_steps

    @property
    def lr_scale(self) -> float:
        """Factor for the learning rate of the next step, by its batch size; 1 unless steps = "constant".

        After a window's last batch it is that of the next window, as far as the curve tells.
        """
        return self._run.lr_scale

    @property
    def between_windows(self) -> bool:
        """True if no window is in progress: before the first, and after the last batch of each."""
        course = self._run.course
        return course.complete or course.pending or not course.open

    @property
    def batch_len(self) -> int:
        """Number of samples in the most recent batch."""
        batch = self._run.recording.batch
        return 0 if batch is None else len(batch.ids)

    @property
    def global_batch_len(self) -> int:
        """Number of samples in the most recent batch over all ranks."""
        batch, shard = self._run.recording.batch, self._run.course.shard
        return 0 if batch is None or shard is None else int(shard.global_sizes[batch.number])

    @property
    def plan(self) -> Plan | None:
        """The plan of the window in progress, or of the last one."""
        shard = self._run.course.shard
        return None if shard is None else shard.plan

    @property
    def ledger(self) -> Ledger:
        """What is known about every sample, up to date; with several ranks, as of the end of the last window."""
        return self._run.ledger

    @property
    def history(self) -> History:
        """The ledger after each window, for up to 5,000 samples; `salience.ledger.history.save` writes it."""
        run = self._run
        run.recording.remember(run.course.window - 1)
        return run.recording.history

    @property
    def copies(self) -> Copies | None:
        """Which samples are copies of each other; None if they were not searched for."""
        return self._run.copying.found

    @property
    def events(self) -> EventLog:
        """The event log."""
        return self._run.events

    @property
    def watch(self) -> Stopwatch:
        """Seconds that salience itself took, by name."""
        return self._run.voice.watch

    @property
    def steps(self) -> Steps:
        """How the training loop spends its time."""
        return self._run.watching.steps

    @property
    def probe(self) -> Probe | None:
        """Measures the loader alone and the loop alone from time to time; None unless a profile is being made."""
        return self._run.watching.probe

    @probe.setter
    def probe(self, probe: Probe | None) -> None:
        self._run.watching.probe = probe

    def summary(self, *, local: bool = False) -> dict[str, Any]:
        """What the run has learnt so far: per-class statistics, hardest and never-learnt samples, what could be saved.

        With several ranks every rank must call it. With `local=True` a single rank may, and gets what its node's ledger knew
        when the ranks last exchanged their statistics.
        """
        return telling.summary(self._run, local=local)

    def report(
        self, path: str | Path | None = None, *, names: SampleNames = None, classes: Names = None, local: bool = False
    ) -> str:
        """The summary as text, also written to the event log, as are the findings behind it.

        With a `path` ("report.html") rank 0 also writes it as a page. `names` are the names of samples (a sequence, or a
        function of the id), `classes` those of classes; a Source knows both. `local` is as in `summary`.
        """
        text = telling.report(self._run, self._class_names(classes), names=self._sample_names(names), local=local)
        if path is not None and self._run.setup.rank == 0:
            from salience.report.html import write_page

            write_page(path, self._page(names, classes))
        return text

    def _repr_html_(self) -> str | None:
        """The page of the run so far, for notebooks; None without jinja2, where the notebook shows text."""
        from salience.report.html import framed

        try:
            return framed(self._page())
        except MissingExtra:
            return None

    def _page(self, names: SampleNames = None, classes: Names = None) -> str:
        from salience.report.html import live_page

        names, classes, config = self._sample_names(names), self._class_names(classes), self._run.planning.config
        preset = preset_name(config.to_dict()) if isinstance(config, SelectConfig) else ""
        return live_page(self._run.events, name="this run", names=names, classes=classes, preset=preset)

    def _sample_names(self, given: SampleNames) -> SampleNames:
        source = None if self._run.feeding is None else self._run.feeding.source
        return given if given is not None or source is None else source.names.__getitem__

    def _class_names(self, given: Names) -> Names:
        source = None if self._run.feeding is None else self._run.feeding.source
        return given if given is not None or source is None else source.index.classes or None

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue as if the run had never stopped. With several ranks, every rank must call it."""
        return saved(self._run)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict()` was taken: the next iteration delivers the rest of that window."""
        resume(self._run, state)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            f"A {type(self).__name__} owns a run, its ledger and its worker processes, and cannot be copied or pickled; make "
            "another one, and carry state_dict() over where it should go on."
        )
