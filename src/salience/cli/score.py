"""Score samples near the data, for a run elsewhere.

    salience train --data s3://bucket/set --select default --remote-scores --out runs/x      (far from the store)
    salience score --source s3://bucket/set --watch runs/x                                   (near it)

The run leaves its weights and a list of the samples it knows least about in runs/x/scorer, a folder that both machines can
reach. This command reads those samples, runs the model forward, and sends back a few numbers for each, which the run takes
in at its next window. Only weights and scores cross the link in between, no images.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from salience.cli.text import subcommand
from salience.errors import ConfigError
from salience.report.console import say


def add(commands: Any) -> None:
    parser = subcommand(commands, "score", __doc__, run)
    parser.add_argument("--source", required=True, metavar="DATA", help="the run's data, by its address here")
    parser.add_argument("--watch", required=True, metavar="RUN", help="folder of the run (its --out)")
    parser.add_argument("--model", metavar="FILE", help="checkpoint that says what the model is (default: RUN/last.pt)")
    parser.add_argument(
        "--interval", type=float, default=0.0, metavar="SECONDS", help="take new weights at most so often (default: 0)"
    )
    parser.add_argument("--batch-size", type=int, default=256, metavar="SIZE", help="samples at once (default: 256)")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda:1, ... (default: cpu)")
    parser.add_argument("--trust", action="store_true", help="import the model's module, where it is not a built-in")


def run(args: argparse.Namespace) -> int:
    if args.interval < 0 or args.batch_size < 1:
        raise ConfigError(f"--interval is {args.interval} (at least 0), --batch-size {args.batch_size} (at least 1).")

    from salience.app import checkpoint
    from salience.app.scoring import Asked, scoring_model
    from salience.signals.remote import answer

    path = Path(args.model or Path(args.watch) / checkpoint.LAST)
    while not path.exists():  # the run writes it after its first epoch
        if args.model:
            raise ConfigError(
                f"There is no checkpoint {args.model!r}; name one, or leave --model out to wait for the run's."
            )
        time.sleep(1)
    saved = checkpoint.read(path)
    if ":" in saved["config"]["model"] and not args.trust:
        raise ConfigError(
            f"The checkpoint names the model {saved['config']['model']!r}, which is code to import; --trust it to do so."
        )
    model, images = scoring_model(saved, args.device), Asked(args.source, saved)
    scored = answer(
        Path(args.watch) / checkpoint.SCORER, model, images, interval=args.interval, batch_size=args.batch_size,
        device=args.device, say=say,
    )  # fmt: skip
    say(f"The run is over; {scored:,} samples were scored.")
    return 0
