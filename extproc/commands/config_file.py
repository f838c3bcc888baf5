"""How commands are told which configuration to read."""

import argparse
import os

from extproc.base.errors import ConfigError

# The variable that names the configuration, and the file that is read without it.
VARIABLE, FILE = "KVSTEER_CONFIG", "kvsteer.yaml"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds both ways to name the configuration to a command's parser."""
    words = f"the configuration file, by default ${VARIABLE} or {FILE}"
    parser.add_argument("file", nargs="?", metavar="FILE", help=words)
    parser.add_argument("--config", metavar="FILE", help="the same as FILE")


def config_of(arguments: argparse.Namespace) -> str:
    """Returns the name of the configuration file.

    Raises:
        ConfigError: two are given, or there is none.
    """
    named, given = arguments.config, arguments.file
    if named and given and named != given:
        raise ConfigError([f"kvsteer: two configurations are given: {given} and {named}"])
    path = named or given or os.environ.get(VARIABLE)
    if path:
        return str(path)
    if not os.path.exists(FILE):  # noqa: PTH110 - pathlib takes longer to import
        raise ConfigError([f"kvsteer: there is no {FILE} here: name a file, or set {VARIABLE}"])
    return FILE
