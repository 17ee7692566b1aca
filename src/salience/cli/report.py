"""Report on a run: what was trained, at what cost, what was selected and what was found.

    salience report runs/train                          a few sentences
    salience report runs/train -o report.html           one self-contained page, with pictures
    salience report run.jsonl --ledger ledger.npz -o report.html
    salience report runs/less --baseline runs/all -o report.html
    salience report runs/train --sink tensorboard:runs/tb

RUN is the folder of a run, or the event log of your own loop (the file given as log=). Pictures come from the data of
the run if it still exists, or from --data. For a run that crashed, everything up to the crash is reported.
"""

from __future__ import annotations

import argparse
from typing import Any

from salience.cli.opening import Opened, open_run, write_page
from salience.cli.text import subcommand
from salience.errors import SalienceError
from salience.report.console import say


def add(commands: Any) -> None:
    parser = subcommand(commands, "report", __doc__, run)
    parser.add_argument("path", metavar="RUN", help="folder of a run, or its event log")
    parser.add_argument("-o", "--output", metavar="FILE", default="", help="HTML file to write")
    parser.add_argument("--baseline", metavar="RUN", default="", help="run to compare it with")
    parser.add_argument(
        "--sink",
        metavar="SINK",
        default="",
        help="send the log's figures to tensorboard:FOLDER, wandb:PROJECT, mlflow:URI",
    )
    parser.add_argument("--ledger", metavar="FILE", default="", help="ledger of the run, if it is not in its folder")
    parser.add_argument(
        "--data", metavar="PATH", default="", help="the run's images: folder, tar, or what a Source takes"
    )


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from salience.report.compared import against, said_of
    from salience.report.text import sections, verdict

    opened = open_run(args.path, ledger=args.ledger)
    baseline = None
    if args.baseline:
        baseline = against(opened.story, open_run(args.baseline, whole=False).story)
    first = verdict(opened.story)
    say(first)
    for name, text in sections(opened.story).items():
        if text and text not in first and name != "hard":  # samples are listed on the page alone
            say(text)
    if baseline is not None:
        say("\n".join(said_of(baseline)))
    for note in (*opened.story.notes, *(baseline.notes if baseline else ())):
        say(f"Note: {note}")
    if args.sink:
        from salience.cli.opening import log_file
        from salience.report.reader import read_log
        from salience.report.sinks import replayed

        replayed(read_log(log_file(args.path)).events, args.sink)
        say(f"Sent to {args.sink}.")
    if not args.output:
        say("For the whole story as a page, add -o report.html.")
        return 0

    from salience.report.html import page

    shown, note = _pictures(opened, args.data)
    story = replace(opened.story, notes=(*opened.story.notes, *([note] if note else [])))
    write_page(page(story, pictures=shown, baseline=baseline), args.output)
    say(f"Written to {args.output}{f', with {len(shown)} pictures' if shown else ''}. {note}".rstrip())
    return 0


def _pictures(opened: Opened, given: str) -> tuple[dict[int, bytes], str]:
    """Pictures of the samples shown, or the reason why there are none. It is an error if the given data does not fit."""
    from salience.cli.pictures import pictures
    from salience.report.story import shown

    ids, data = shown(opened.story), given or str(opened.settings.get("data", ""))
    if not data or not ids or opened.ledger is None:
        missing = "there is no ledger to find the samples by" if opened.ledger is None else "--data names no images"
        return {}, f"No pictures: {missing}." if ids and (given or opened.ledger is not None) else ""
    try:
        return pictures(data, ids, opened.ledger), ""
    except SalienceError as cause:
        if given:
            raise
        return {}, f"No pictures: {cause}"
