"""`kvsteer report`: compares steered requests with those left to Envoy's own choice.

The router compares them, and renders the comparison; this shows or keeps its answer.
"""

import argparse
from pathlib import Path
from urllib.parse import urlencode

from extproc.base.errors import StartError
from extproc.commands.admin_client import fetch
from extproc.commands.router_url import add_admin
from extproc.commands.terminal import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.set_defaults(run=run)
    add_admin(parser, "--url")
    parser.add_argument(
        "--since", metavar="TIME", help="only the last TIME, such as 90m, 12h or 7d"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument(
        "--html", metavar="FILE", help="write the report as a page with plots to FILE"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the report, or writes it; returns the exit status.

    Raises:
        StartError: the router cannot be asked, or the file cannot be written.
    """
    form = "json" if arguments.json else "html" if arguments.html else "text"
    query = {"format": form, **({"since": arguments.since} if arguments.since else {})}
    answer = fetch("report", arguments.admin, f"/report?{urlencode(query)}")
    if arguments.html:
        try:
            Path(arguments.html).write_bytes(answer)
        except OSError as error:
            raise StartError(f"report: {arguments.html}: {error.strerror}") from None
        return 0
    print("\n".join(plain(line) for line in answer.decode(errors="replace").split("\n")), end="")
    return 0
