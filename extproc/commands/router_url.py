"""How commands are told which running router to ask."""

import argparse

DEFAULT_ADMIN = "http://127.0.0.1:9090"


def add_admin(parser: argparse.ArgumentParser, *other_names: str) -> None:
    """Adds the option that names the router's admin server, with other names if there are any."""
    names, says = ("--admin", *other_names), "the router's admin server"
    parser.add_argument(*names, default=DEFAULT_ADMIN, metavar="URL", help=says)
