"""`kvsteer doctor`: its options, and its exit status."""

import argparse
import asyncio
import logging

from extproc.config.reader import load
from extproc.doctor.doctor import examine
from extproc.doctor.findings import as_json, as_text, exit_status

DEFAULT_SECONDS = 5.0
MAX_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_SECONDS,
        metavar="SECONDS",
        help="for each question and each wait (default: %(default)g)",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="ask each worker for tiny completions and wait for their events, ask for whole"
        " replays, and drain queues: what is drained, a running router does not get",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examines everything and prints what was found; 0 when nothing is wrong, 1 otherwise.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    config = load(arguments.config)
    logging.disable(logging.WARNING)  # what the parts log, the findings say
    try:
        findings = asyncio.run(examine(config, arguments.timeout, probes=arguments.probe))
    finally:
        logging.disable(logging.NOTSET)
    print(as_json(findings) if arguments.json else as_text(findings))
    return exit_status(findings)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be above 0 and up to {MAX_SECONDS:g}")
    return seconds
