"""`kvsteer envoy --patch`: prints an existing envoy.yaml with KVSteer added, or the changes."""

import argparse
import sys

from extproc.base.errors import importing_extra
from extproc.commands.config_file import config_of
from extproc.config.reader import load, read_text
from kvtools.envoy.yaml_edit import MAX_CHARACTERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what to add, and where."""
    group = parser.add_argument_group(
        "add KVSteer to an Envoy that you run",
        "The file itself is not changed. Notes go to standard error.",
    )
    group.add_argument(
        "--patch", metavar="FILE", help="print this envoy.yaml (or JSON) with KVSteer added"
    )
    group.add_argument("--diff", action="store_true", help="print the changes as a diff")
    group.add_argument(
        "--cluster",
        action="append",
        default=[],
        metavar="NAME",
        help="the workers' cluster, if it cannot be found by their addresses; once for each model",
    )
    group.add_argument("--listener", metavar="NAME", help="change only this listener")
    group.add_argument(
        "--access-log",
        action="store_true",
        help="add fields to the JSON access logs: request id, workers picked, worker that answered",
    )
    render = parser.get_default("run")

    def run(arguments: argparse.Namespace) -> int:
        """Prints the file with KVSteer added, or without a file what KVSteer renders."""
        if arguments.patch is not None:
            return _patch(arguments)
        if arguments.diff or arguments.cluster or arguments.listener or arguments.access_log:
            message = "--diff, --cluster, --listener and --access-log belong to --patch"
            print(f"kvsteer: envoy: {message}", file=sys.stderr)
            return 2
        return int(render(arguments))

    parser.set_defaults(run=run)


def _patch(arguments: argparse.Namespace) -> int:
    with importing_extra("envoy", "envoy"):
        from kvtools.envoy.envoy_patch import PatchOptions, difference, patched

    config = load(config_of(arguments), arguments.processes)
    name = arguments.patch
    text = read_text(name, MAX_CHARACTERS)
    choice = PatchOptions(tuple(arguments.cluster), arguments.listener, arguments.access_log)
    patch = patched(text, name, config, choice)
    sys.stdout.write(difference(text, patch.text, name) if arguments.diff else patch.text)
    for note in patch.notes:
        print(f"{name}: note: {note}", file=sys.stderr)
    if patch.text == text:
        print(f"{name}: KVSteer is already in it; nothing changed", file=sys.stderr)
    return 0
