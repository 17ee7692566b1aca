"""The framework: filter, score, normalise, sample, weight. From a ledger, a config and a clock to one frozen Plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from salience.config import SelectConfig, Use
from salience.errors import ConfigError, PluginError
from salience.ledger import COLUMNS, Ledger
from salience.ledger.copies import Copies
from salience.plan import Note, Plan
from salience.registry import find
from salience.seeds import PLAN, generator
from salience.select.batching import Batching, filled, members, trimmed
from salience.select.drawing import choose_outside
from salience.select.fetching import Stock, Swap, refresh_set, swap, swap_note
from salience.select.plugins import Plugin, plugin_of
from salience.select.ranks import rank_normalise
from salience.select.view import NO_REFERENCE, Bools, Candidates, Clock, Draw, Floats, Ids, Reference, Rng, View
from salience.select.weights import loss_weights, robust_strength, scaled_weights
from salience.stats import known_mean

Warn = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sifted:
    """The combined verdict of all filters; masks are bool [n], None if no filter has an opinion."""

    allowed: Bools | None
    forced: Bools | None
    factor: Floats | None
    noise: float | None
    notes: tuple[Note, ...]


class Pipeline:
    """A SelectConfig with its plug-ins resolved. Its only state is which plug-ins failed and which warnings were given."""

    def __init__(
        self,
        config: SelectConfig,
        *,
        reference: Reference | None = None,
        strict: bool = False,
        warn: Warn | None = None,
    ) -> None:
        self.config = config
        self.reference = reference
        """The opinion of another model on the samples; it may be set later, but before the first plan."""
        self.quality: Floats | None = None
        """The user's own column, float32 [n]; None without one."""
        self.filters = [plugin_of("filters", u) for u in config.filters]
        self.scores = [plugin_of("scores", u) for u in config.scores]
        self.sampler = plugin_of("samplers", config.sampler)
        self.curve = plugin_of("curves", config.keep)
        self.warmup = True
        """False if the curve's windows that visit everything at the start are left out."""
        self.off: set[str] = set()
        """Plug-ins that failed, by "kind/name"; they are not called again."""
        self._said_biased = False
        self._strict = strict
        self._warn: Warn = warn or (lambda text: None)
        self.keep(Clock(window=0, windows=1))  # a wrong share is said now, not in mid-run

    def set_warmup(self, warmup: bool) -> None:
        """Leave out the windows that visit everything at the start, for a run that knows its samples, or have them again."""
        keep = self.config.keep
        self.curve, self.warmup = plugin_of("curves", keep if warmup else _without_warmup(keep)), warmup

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Filters, scores and the sampler: everything that looks at the samples."""
        return (*self.filters, *self.scores, self.sampler)

    def needs(self) -> list[tuple[Plugin, str]]:
        """Plug-ins, each with a ledger column that it needs `loss()` to fill."""
        return [(plugin, column) for plugin in self.plugins for column in plugin.card.needs if column in COLUMNS]

    @property
    def tries(self) -> bool:
        """True if the sampler uses trials of hard samples, which the run then makes."""
        return "trial" in self.sampler.card.needs

    @property
    def exact(self) -> bool:
        """True if the number of visits of every window follows from the config alone."""
        return self.config.fetch is None and all(plugin.card.exact for plugin in (*self.plugins, self.curve))

    def keep(self, clock: Clock) -> float:
        """The share of the samples that the curve grants at this time; a static selection has one share for the whole run."""
        if self.config.mode == "static":
            if clock.window < self.config.scored_for:
                return 1.0
            clock = replace(clock, window=max(self.config.scored_for, clock.windows // 2), steered=None)
        return self.curve(clock)

    def budget(self, window: int, windows: int, population: int, steered: float | None = None) -> int:
        """Visits the curve grants a window, before rounding to whole batches; `steered` is the share of `keep = "auto"`."""
        return max(1, round(self.keep(Clock(window=window, windows=windows, steered=steered)) * population))

    def plan(
        self,
        ledger: Ledger,
        *,
        window: int,
        windows: int,
        batch_size: int,
        seed: int,
        piece: int = 0,
        pieces: int = 1,
        world: int = 1,
        drop_last: bool = False,
        steered: float | None = None,
        copies: Copies | None = None,
        stock: Stock | None = None,
        judged: Any = None,
        opinions: Sequence[Ledger] = (),
        learnt_loss: float | None = None,
        jury: tuple[Ledger, Ledger] | None = None,
        share: float | None = None,
        force: Bools | None = None,
    ) -> Plan:
        """A pure function of its arguments (and of config, reference and which plug-ins are off).

        `batch_size` is that of a full window over all `world` ranks. Where an epoch is planned in `pieces`, `window` and
        `windows` count epochs, and this plan is over the members of one piece.
        `copies` are the near-copies known, `stock` says where the bytes of the samples are, and `judged` is the judgement of
        the labels if it was already made for this ledger. Scores are means over the `opinions`, where there are any.
        `learnt_loss` is what a probe of gradients found, and `jury` what a jury said. `share` is kept instead of what the curve
        says, and `force`, bool [n], names samples to be visited for certain.
        """
        for plugin in self.plugins:
            if "reference" in plugin.card.needs and self.reference is None:
                raise ConfigError(f"{plugin.kind[:-1]} {plugin.name!r} needs {NO_REFERENCE}.")
        keep = self.keep(Clock(window=window, windows=windows, steered=steered)) if share is None else share
        among = members(ledger.n, window, piece, pieces)
        window, windows = window * pieces + piece, windows * pieces
        clock = Clock(window=window, windows=windows, steered=steered, keep=keep, learnt_loss=learnt_loss)
        view = View(ledger, clock, self.reference, copies, judged, seed, jury, self.quality)
        rng = generator(seed, PLAN, window)
        sifted = self._filter(view) if pieces == 1 else _within(self._filter(view), among, ledger.n)
        if force is not None:
            sifted = replace(sifted, forced=_joined(np.logical_or, sifted.forced, force))
        batching = self.batching(batch_size, world, drop_last)
        last = window >= windows - 1
        granted = max(1, round(clock.keep * len(among)))
        batch, everything = batching.batch(granted, len(among)), granted >= len(among)
        budget = len(among) if everything else batching.visits(granted, len(among), last=last)
        importance, raw = self._score(view) if not opinions else self._mean_score(clock, opinions, seed)
        ids, weights, unbiased, note = self._draw(view, sifted, importance, raw, budget, batch, rng)
        notes = sifted.notes if note is None else (*sifted.notes, note)
        if self.config.fetch is not None and not everything:
            ids, weights, note = self._fetch(view, sifted, importance, ids, weights, stock, rng)
            notes = (*notes, self._withdrawn(note) if unbiased else note)
        if sifted.factor is not None:
            weights = scaled_weights(weights, sifted.factor[ids])
        fills = last and not drop_last
        if not fills:
            none = np.zeros(len(ids), dtype=bool)
            forced = none if sifted.forced is None else sifted.forced[ids]
            stay = trimmed(batch, forced, view.age[ids] > 1 if everything else none, rng)
            ids, weights = ids[stay], weights[stay]
        if (weights == 1).all():
            rng.shuffle(ids)
        else:
            order = rng.permutation(len(ids))
            ids, weights = ids[order], weights[order]
        if fills:
            ids, weights = filled(ids, weights, batch, rng)
        return Plan(
            window=window, population=ledger.n, batch_size=batch, drop_last=drop_last,
            ids=ids, weights=weights, importance=importance[ids], level=np.zeros(len(ids), dtype=np.uint8),
            lr_scale=(batch / batch_size) ** self.config.lr_power if batching.constant else 1.0,
            importance_of_all=importance.astype(np.float16), notes=notes,
            robust=robust_strength(self.config.robust, sifted.noise),
        )  # fmt: skip

    def batching(self, batch_size: int, world: int, drop_last: bool) -> Batching:
        """How visits become steps, with `batch_size` samples per step over all ranks in a full window."""
        constant = self.config.steps == "constant"
        return Batching(size=max(batch_size, world), world=world, constant=constant, drop_last=drop_last)

    def _fetch(
        self, view: View, sifted: Sifted, importance: Floats, ids: Ids, weights: Floats, stock: Stock | None, rng: Rng
    ) -> tuple[Ids, Floats, Note]:
        """Exchange unimportant samples for others that are cheap to fetch, and add the samples to refresh."""
        how = self.config.fetch
        assert how is not None
        found: Swap | None = None
        if stock is not None:
            found = swap(
                ids, importance, stock, label=view.label, age=view.age, forced=sifted.forced, allowed=sifted.allowed, how=how,
                rng=rng,
            )  # fmt: skip
            place = np.full(view.n, -1, dtype=np.int64)
            place[ids] = np.arange(len(ids))
            ids = ids.copy()
            ids[place[found.out]] = found.taken
        picked = np.zeros(view.n, dtype=bool)
        picked[ids] = True
        more = refresh_set(view, picked, sifted.allowed, how.refresh, rng)
        note = swap_note(found, len(more), view.age, how)
        return np.concatenate((ids, more)), np.concatenate((weights, np.ones(len(more), dtype=np.float32))), note

    def _withdrawn(self, note: Note) -> Note:
        """The note on an exchange after a draw with unbiased weights, which no longer are unbiased; warns once."""
        text = (
            f"select.fetch exchanges samples after sampler {self.sampler.name!r} drew them with unbiased weights: weighted "
            "losses and gradients no longer estimate those of all samples. Leave out fetch where they must"
        )
        if not self._said_biased:
            self._said_biased = True
            self._warn(f"{text}.")
        return replace(note, reason=f"{note.reason}; the weights are not unbiased")

    def _filter(self, view: View) -> Sifted:
        """Which samples may be visited, which must be, which weigh less, and what each filter did.

        The order of the filters does not matter: what several leave out adds up, and a forced sample is visited even if others
        leave it out. A factor of 0 only holds for samples that no filter forces to be learnt.
        """
        allowed: Bools | None = None
        forced: Bools | None = None
        learnt: Bools | None = None
        factor: Floats | None = None
        noise: float | None = None
        notes: list[Note] = []
        for plugin in self.filters:
            verdict = self._ask(plugin, view)
            if verdict is None:
                continue
            keep, force = verdict.keep, verdict.force
            taught = force if force is None or verdict.factor is None else force & (verdict.factor > 0)
            allowed, forced = _joined(np.logical_and, allowed, keep), _joined(np.logical_or, forced, force)
            learnt, factor = _joined(np.logical_or, learnt, taught), _joined(np.multiply, factor, verdict.factor)
            noise = _joined(np.fmax, noise, verdict.noise)
            dropped, musts = (0 if mask is None else int(np.count_nonzero(mask)) for mask in (keep, force))
            dropped = 0 if keep is None else view.n - dropped
            notes.append(Note(name=plugin.name, dropped=dropped, forced=musts, reason=verdict.reason))
        if allowed is not None and not allowed.any():
            self._warn("The filters left out every sample; none of them is applied in this window.")
            allowed = None
        if factor is not None and learnt is not None:
            factor = np.where(learnt & (factor == 0), np.float32(1), factor)
        return Sifted(allowed=allowed, forced=forced, factor=factor, noise=noise, notes=tuple(notes))

    def _score(self, view: View) -> tuple[Floats, Floats]:
        """Rank-normalised importance in [0, 1] and the weighted sum of raw scores, float32 [n] each."""
        ranks: list[tuple[float, Floats]] = []
        raw: Floats | None = None
        for plugin in self.scores:
            score = self._ask(plugin, view)
            if score is None or plugin.weight == 0:
                continue
            ranks.append((plugin.weight, rank_normalise(score)))
            weighted = score if plugin.weight == 1 else score * np.float32(plugin.weight)
            raw = weighted if raw is None else raw + weighted
        if not ranks or raw is None:
            flat = np.full(view.n, 0.5, dtype=np.float32)
            return flat, flat
        if len(ranks) == 1:
            return ranks[0][1], raw
        total = sum(weight for weight, _ in ranks)
        return sum(np.float32(weight / total) * rank for weight, rank in ranks), raw  # pyright: ignore[reportReturnType]

    def _mean_score(self, clock: Clock, opinions: Sequence[Ledger], seed: int) -> tuple[Floats, Floats]:
        """The same from the mean of the raw scores over several ledgers (Data Diet, Paul et al. 2021)."""
        raws = [self._score(View(opinion, clock, self.reference, seed=seed))[1] for opinion in opinions]
        raw = known_mean(np.stack(raws)).astype(np.float32)
        return rank_normalise(raw), raw

    def _draw(
        self, view: View, sifted: Sifted, importance: Floats, raw: Floats, budget: int, batch: int, rng: Rng
    ) -> tuple[Ids, Floats, bool, Note | None]:
        """Ids and weights: forced samples first (those that have waited longest, if the budget does not hold all of them).

        Also True if the weights give an unbiased gradient over all samples that may be visited, and a note. A sampler that
        sets its own budget is asked whatever is left of the curve's, and the note says what it did; if its samples and the
        forced ones do not fill a batch, others are added at random.
        """
        allowed, forced = sifted.allowed, sifted.forced
        own = not self.sampler.card.exact
        musts = np.empty(0, dtype=np.int64) if forced is None else np.flatnonzero(forced)
        if len(musts) > budget:
            waiting = view.age[musts] + rng.random(len(musts))
            musts = musts[np.argpartition(-waiting, budget - 1)[:budget]]
            forced = np.zeros(view.n, dtype=bool)
            forced[musts] = True
        free = allowed
        if forced is not None:
            free = ~forced if allowed is None else allowed & ~forced
        ids = np.arange(view.n) if free is None else np.flatnonzero(free)
        budget = min(budget - len(musts), len(ids))
        note = None
        if view.clock.keep >= 1 or (budget >= len(ids) > 0 and not own):
            draw = Draw(positions=np.arange(budget), inclusion=np.ones(budget, dtype=np.float32), temper=1.0)
        elif not len(ids) or (budget <= 0 and not own):
            draw = Draw(positions=np.empty(0, dtype=np.int64))
        else:
            some = importance if free is None else importance[ids]
            draw = self._sample(
                Candidates(view=view, ids=ids, importance=some, raw_of_all=raw, noise=sifted.noise), budget, rng
            )
            if own or draw.note:
                found = draw.note or f"sets its own budget: {len(draw.positions):,} of {len(ids):,}"
                found += f"; the curve grants {budget:,}" if own else ""
                dropped = len(ids) - len(draw.positions) if own else 0
                note = Note(name=self.sampler.name, dropped=dropped, forced=0, reason=found)
        positions, inclusion, temper = draw.positions, draw.inclusion, draw.temper
        lacking = min(batch - len(musts) - len(positions), len(ids) - len(positions))
        if own and inclusion is None and lacking > 0:
            taken = np.zeros(len(ids), dtype=bool)
            taken[positions] = True
            positions = np.concatenate((positions, choose_outside(rng, taken, lacking)))
        chosen = np.concatenate((musts, ids[positions])) if len(musts) else ids[positions]
        if inclusion is None or temper is None:
            return chosen, np.ones(len(chosen), dtype=np.float32), False, note
        inclusion = np.concatenate((np.ones(len(musts), dtype=np.float32), inclusion))
        weights = loss_weights(inclusion, len(chosen), len(ids) + len(musts), temper)
        return chosen, weights, temper == 1, note

    def _sample(self, candidates: Candidates, budget: int, rng: Rng) -> Draw:
        """The sampler's draw, with `temper` filled in if its card says `unbiased`; a uniform draw if the sampler fails."""
        draw = self._ask(self.sampler, candidates, budget, rng)
        if draw is None:
            return replace(find("samplers", "uniform")(candidates, budget, rng), temper=1.0)
        return replace(draw, temper=1.0) if draw.temper is None and self.sampler.card.unbiased else draw

    def _ask(self, plugin: Plugin, *given: Any) -> Any:
        """The plug-in's result, or None if it failed: then it is switched off with a warning, and training continues."""
        if plugin.key in self.off:
            return None
        try:
            return plugin(*given)
        except ConfigError:
            raise
        except Exception as cause:
            which, how = f"{plugin.kind[:-1]} {plugin.name!r}", f"{type(cause).__name__}: {cause}"
            if self._strict:
                raise PluginError(f"{which} failed: {how}") from cause
            self.off.add(plugin.key)
            self._warn(f"{which} failed and is switched off for this run: {how}")
            return None


def _joined(join: Callable[[Any, Any], Any], one: Any, two: Any) -> Any:
    """Both combined, or the one that is not None."""
    return two if one is None else one if two is None else join(one, two)


def _within(sifted: Sifted, among: range, n: int) -> Sifted:
    """The same verdict for a plan over only some of the samples."""
    here = np.zeros(n, dtype=bool)
    here[among.start : among.stop : among.step] = True
    allowed = here if sifted.allowed is None else sifted.allowed & here
    forced = None if sifted.forced is None else sifted.forced & here
    return replace(sifted, allowed=allowed if allowed.any() else here, forced=forced)


def _without_warmup(keep: Use) -> Use:
    """The curve without windows that visit everything at the start, for a run that knows its samples; or as it is."""
    if "warmup" not in inspect.signature(find("curves", keep.name)).parameters:
        return keep
    return replace(keep, options={**keep.options, "warmup": 0})
