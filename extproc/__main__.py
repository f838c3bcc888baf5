"""The command line: `kvsteer`, or `python -m extproc`.

Each command imports what it needs when it runs, which keeps the others fast: `health` is a probe,
run every few seconds, so this module and what it imports take few milliseconds.
"""

import argparse
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

from extproc.base.errors import ConfigError, ExtraError, StartError, importing_extra
from extproc.commands.config_file import add_config, config_of
from extproc.commands.router_url import add_admin
from kvstate.errors import NotBuiltError, importing_cores

TYPE_CHECKING = False  # as in typing, whose import takes a probe several milliseconds
if TYPE_CHECKING:
    from typing import Any

    from extproc.config.schema import Config

DEFAULT_EXTPROC = "127.0.0.1:9002"
DEFAULT_METRICS = "127.0.0.1:9091"

# The maximum of `extproc.processes`.
MAX_PROCESSES = 64

# A shell's exit status for a command that a signal ended is this plus the signal's number.
_BY_SIGNAL = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, 1 if it failed, 2 if it was misused."""
    if os.getpid() == 1:
        # The kernel drops signals that the first process of a container does not handle. Without
        # this, `docker stop` would have no effect on a command before it sets its own handler, if
        # it ever does.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(_BY_SIGNAL + number))
    given = sys.argv[1:] if arguments is None else list(arguments)
    if (fault := _misuse(given)) is not None:
        print(fault, file=sys.stderr)
        return 2
    parsed = make_parser(given[0]).parse_args(given)
    try:
        with importing_cores():
            status = int(parsed.run(parsed))
        sys.stdout.flush()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (StartError, NotBuiltError) as error:
        print(f"kvsteer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BY_SIGNAL + signal.SIGPIPE
    return status


# Every command, grouped by its purpose.
_GROUPS = {
    "Try it, and prove the gain": {
        "demo": "run simulated workers, a router and Envoy on this machine",
        "report": "compare steered requests with those left to Envoy's own choice",
        "whatif": "play recorded requests over a simulated fleet, with each policy",
    },
    "Connect it": {
        "check": "check a configuration; exit 2 if it has faults",
        "envoy": "print an envoy.yaml for a configuration, or your own with KVSteer added",
        "doctor": "check everything that a configuration names; exit 1 if anything is wrong",
    },
    "Run it": {
        "serve": "run the router",
        "bridge": "serve one engine's events to any number of routers",
        "health": "exit 0 if a router is ready; for probes",
    },
    "Look at a running router": {
        "top": "show workers and decisions, refreshed every two seconds",
        "explain": "show where a request would go, and why",
        "why": "show why prompts were computed again, and who breaks the cache",
    },
    "Simulate": {
        "worker": "run one simulated worker",
        "traffic": "send simulated chats to an Envoy",
    },
    "Shell": {
        "completion": "print a script that completes commands and options",
    },
}


# The commands that `kvsteer-tools` brings, and what it adds to the command `envoy`.
TOOLS = frozenset({
    "demo", "report", "whatif", "doctor", "bridge", "top", "worker", "traffic", "completion",
    "why",
})  # fmt: skip
ENVOY_PATCH = "envoy-patch"


def _misuse(given: Sequence[str]) -> str | None:
    """Returns what to say if no command is given, or none that is there; None if one is."""
    if not given:
        return make_parser("").format_help().rstrip()
    names, word = [name for group in _GROUPS.values() for name in group], given[0]
    if word in names or word.startswith("-"):
        return _missing_tool(given)
    import difflib

    near = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "`kvsteer` lists the commands"
    return f"kvsteer: there is no command {word!r}; {hint}"


def _missing_tool(given: Sequence[str]) -> str | None:
    """Returns what to say if the command needs a tool that is not installed; None if not."""
    tool, used = _tool_of(given[0]), given[0]
    if tool == ENVOY_PATCH:
        used = "envoy --patch"
        tool = tool if any(word.startswith("--pa") for word in given) else None
    if tool is None:
        return None
    from extproc.commands.tools import installed_tools, missing

    return None if tool in installed_tools() else missing(used)


def _tool_of(command: str) -> str | None:
    """Returns the tool that brings a command or adds to it, None if there is none."""
    if command == "envoy":
        return ENVOY_PATCH
    return command if command in TOOLS else None


def _list_of_commands() -> str:
    """Returns the commands by purpose, those last that are not installed."""
    from extproc.commands.tools import INSTALL, installed_tools

    absent = TOOLS - installed_tools().keys()
    groups = {
        title: {name: text for name, text in group.items() if name not in absent}
        for title, group in _GROUPS.items()
    }
    groups[f"Not installed ({INSTALL} in a clone)"] = {
        name: text for group in _GROUPS.values() for name, text in group.items() if name in absent
    }
    width = max(len(name) for group in _GROUPS.values() for name in group)
    listed = "".join(
        f"\n{title}:\n"
        + "".join(f"  {name:<{width}}  {help_text}\n" for name, help_text in group.items())
        for title, group in groups.items()
        if group
    )
    return f"{listed.strip()}\n\n`kvsteer COMMAND --help` shows the options of a command."


def make_parser(command: str | None) -> argparse.ArgumentParser:
    """Returns the parser.

    command: the command given; the modules of others are not loaded, and the commands are listed
    only if it is none. None loads all options of all that is installed.
    """
    lists = command is not None and (not command or command.startswith("-"))
    parser = argparse.ArgumentParser(
        prog="kvsteer",
        usage="kvsteer COMMAND ...",
        description="Routes LLM requests behind Envoy to the worker that holds their prefix.",
        epilog=_list_of_commands() if lists else "",
        formatter_class=_Raw,
    )
    parser.add_argument(
        "--version",
        action=_ShowVersion,
        nargs=0,
        help="show the version",
    )
    commands = parser.add_subparsers(
        required=True, prog="kvsteer", metavar="COMMAND", help=argparse.SUPPRESS
    )
    made = {
        name: commands.add_parser(
            name,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}.",
            formatter_class=_Help,
        )
        for group in _GROUPS.values()
        for name, help_text in group.items()
    }
    _add_configured(made)
    _add_explain(made["explain"])
    _add_health(made["health"])
    for name in made if command is None else made.keys() & {command}:
        tool = _tool_of(name)
        if tool is not None:
            _add_tool(made[name], tool)
    return parser


def _add_tool(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the options of a tool, if it is installed."""
    from extproc.commands.tools import load_tool

    with _loading():
        add_arguments = load_tool(name)
    if add_arguments is not None:
        add_arguments(parser)


def _add_configured(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Adds the options of the commands that read a configuration."""
    made["serve"].set_defaults(run=_serve)
    made["check"].set_defaults(run=_check)
    made["envoy"].set_defaults(run=_envoy)
    for configured in (made["serve"], made["check"], made["envoy"]):
        add_config(configured)
        configured.add_argument(
            "--processes",
            type=_count,
            metavar="N",
            help="run N processes instead of extproc.processes of the file",
        )
    made["serve"].add_argument(
        "--take-over",
        action="store_true",
        help="replace the router that runs with the same state.file, without refusing a connection",
    )
    made["serve"].add_argument("--member", help=argparse.SUPPRESS)  # set by the parent process


def _add_health(health: argparse.ArgumentParser) -> None:
    health.add_argument(
        "--at", default=DEFAULT_EXTPROC, metavar="ADDRESS", help="the router's extproc.listen"
    )
    health.add_argument(
        "--ca", metavar="FILE", help="use TLS, and trust the authorities in this PEM file"
    )
    health.add_argument("--name", help="the name in the router's certificate, if --at has another")
    health.add_argument(
        "--certificate", metavar="FILE", help="the client certificate, if the router requires one"
    )
    health.add_argument("--key", metavar="FILE", help="the private key of --certificate")
    health.add_argument(
        "--faults",
        metavar="ADDRESS",
        help="the router's metrics.listen, from which a ready router's faults are shown (default:"
        f" {DEFAULT_METRICS}, without --at)",
    )
    health.set_defaults(run=_health)


def _header(text: str) -> tuple[str, str]:
    """Returns a header that is written as name:value."""
    name, colon, value = text.partition(":")
    if not (name.strip() and colon):
        raise argparse.ArgumentTypeError(f"want NAME:VALUE, not {text!r}")
    return name.strip(), value.strip()


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.description = (
        "Shows where a request would go, and why. Reads the request's JSON body from a file or from"
        " standard input; nothing is sent to a worker."
    )
    explain.add_argument(
        "file", nargs="?", metavar="FILE", help="the request's body, instead of standard input"
    )
    add_admin(explain)
    explain.add_argument(
        "--path", default="/v1/chat/completions", metavar="URL-PATH", help="the request's path"
    )
    explain.add_argument(
        "--header",
        action="append",
        default=[],
        type=_header,
        metavar="NAME:VALUE",
        help="a header of the request, such as its tenant's or class's; may be repeated",
    )
    explain.add_argument(
        "--request-id",
        metavar="ID",
        help="explain the last decision on the request with this x-request-id instead",
    )
    explain.add_argument(
        "--trace-id",
        metavar="ID",
        help="explain the last decision on a request of this trace (traceparent) instead",
    )
    explain.add_argument("--json", action="store_true", help="print all details as JSON")
    explain.set_defaults(run=_explain)


class _Help(argparse.HelpFormatter):
    """Formats help for the terminal's width, which argparse would ask of a slower module.

    argparse makes one for each option, to check it.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)

    def _get_help_string(self, action: argparse.Action) -> str:
        """Returns an option's help with its default, unless it has none or names it itself."""
        help_text = action.help or ""
        has_default = action.default not in (None, False, "", [], argparse.SUPPRESS)
        if not action.option_strings or not has_default or "default" in help_text:
            return help_text
        shown = f"{action.default:g}" if isinstance(action.default, float) else "%(default)s"
        return f"{help_text} (default: {shown})"


class _Raw(_Help, argparse.RawDescriptionHelpFormatter):
    """The same, with descriptions as they are written."""


def _columns() -> int:
    """Returns the width of the terminal, 80 if there is none."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else -1).columns or 80
    except (ValueError, OSError):
        return 80


class _ShowVersion(argparse.Action):
    """Prints the version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from extproc.base.installed import installed_version

        print(f"kvsteer {installed_version()}")
        parser.exit()


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Makes the garbage collector ignore what is loaded in the block, then and later.

    Examining the growing modules repeatedly takes almost a tenth of the time until a router is
    ready, and modules are needed until the end. Does nothing if the collector already ignores
    objects: then the process has not just begun, or is not ours alone.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _count(text: str) -> int:
    """Returns a number of processes.

    Raises:
        ArgumentTypeError: the text is not a valid number.
    """
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MAX_PROCESSES}, is {text!r}")
    return int(text)


def _serve(arguments: argparse.Namespace) -> int:
    from extproc.config.reader import load

    path = config_of(arguments)
    config = load(path, arguments.processes)
    if config.extproc.processes > 1 and arguments.member is None:
        if arguments.take_over:
            raise StartError("take-over: one process can be replaced, not several")
        return _serve_several(path, config)
    with _loading():
        from extproc.running.event_loop import run
        from extproc.running.lifetime import serve
        from extproc.running.processes import ProcessMember

    member = None if arguments.member is None else ProcessMember.parse(arguments.member)
    run(serve(path, config, member, takes_over=arguments.take_over))
    return 0


def _serve_several(path: str, config: "Config") -> int:
    import asyncio

    from extproc.base import logs
    from extproc.running import processes

    if config.recorder.file is not None:
        from extproc.features.recording.recorder import share_secret

        share_secret(os.environ)

    logs.configure(config.log.level, config.log.format)
    return asyncio.run(processes.serve(path, config.extproc.processes))


def _check(arguments: argparse.Namespace) -> int:
    from importlib.util import find_spec

    from extproc.commands.needed_files import NEEDED_FILES, template_notes
    from extproc.config.fleet_rules import missing_extras
    from extproc.config.reader import load
    from extproc.config.rules import doubts, omissions

    path = config_of(arguments)
    config = load(path, arguments.processes, NEEDED_FILES)
    lacking = (str(ExtraError(one.key, one.name)) for one in missing_extras(config, find_spec))
    likely = (*doubts(config, os.path.exists), *omissions(config), *template_notes(config))
    for note in (*lacking, *likely):
        print(f"{path}: note: {note}")
    print(f"{path}: ok")
    return 0


def _envoy(arguments: argparse.Namespace) -> int:
    from extproc.config.reader import load

    with importing_extra("envoy", "envoy"), _loading():
        from extproc.envoy.envoy_config import render
    print(render(load(config_of(arguments), arguments.processes)), end="")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    import json

    from extproc.commands.admin_client import ask, find_decision

    for name in ("request_id", "trace_id"):
        if value := getattr(arguments, name):
            return _show_explanation(arguments, find_decision(arguments.admin, name, value))
    source = arguments.file or "standard input"
    try:
        body = json.loads(_body_text(arguments.file))
    except (ValueError, RecursionError) as error:
        print(f"kvsteer: explain: {source} is not JSON: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"kvsteer: explain: {source}: {error.strerror}", file=sys.stderr)
        return 2
    # a complete envelope is accepted, so that recorded ones can be piped in
    asked = {"path": arguments.path, "headers": dict(arguments.header), "body": body}
    envelope = body if _is_envelope(body) else asked
    return _show_explanation(arguments, ask("explain", arguments.admin, "/explain", envelope))


def _body_text(file: str | None) -> str:
    """Returns the text of a request's body: the file's, or that of standard input.

    Raises:
        OSError: the file cannot be read.
        ValueError: the text is empty, or is not UTF-8.
    """
    if file:
        from pathlib import Path

        from extproc.requests.compression import is_compressed

        written = Path(file).read_bytes()
        if is_compressed(written, ""):
            raise ValueError(
                "it is compressed; engines refuse such bodies, and no prompt is read in them: put"
                " Envoy's decompressor before ext_proc"
            )
        return written.decode("utf-8")
    if sys.stdin.isatty():
        print("reads a request's body, as JSON, from standard input", file=sys.stderr)
    text = sys.stdin.read()
    if not text.strip():
        raise ValueError("it is empty; `docker exec` and `docker run` need -i to pass it on")
    return text


def _show_explanation(arguments: argparse.Namespace, explanation: "Mapping[str, Any]") -> int:
    """Prints the answer of POST /explain, or of GET /decisions/ID."""
    import json
    import textwrap
    from shutil import get_terminal_size

    if arguments.json:
        print(json.dumps(explanation, indent=2))
        return 0
    from extproc.commands.layout import cut, layout_of
    from extproc.commands.terminal import explained

    columns = get_terminal_size().columns if sys.stdout.isatty() else None
    try:
        lines = explained(explanation, layout_of(sys.stdout, os.environ))
    except (KeyError, TypeError) as error:
        words = f"explain: {arguments.admin}: its answer does not match this version; try --json"
        raise StartError(words) from error
    sentence, *table = lines
    print(sentence if columns is None else "\n".join(textwrap.wrap(sentence, columns)))
    for line in table:
        print(line if columns is None else cut(line, columns))
    return 0


def _health(arguments: argparse.Namespace) -> int:
    from extproc.commands.health import ClientTls, fault_of, faults_at

    given = (arguments.name, arguments.certificate, arguments.key)
    if (arguments.certificate is None) != (arguments.key is None):
        print("kvsteer: health: --certificate and --key belong together", file=sys.stderr)
        return 2
    if arguments.ca is None and any(given):
        print("kvsteer: health: TLS needs --ca", file=sys.stderr)
        return 2
    fault = fault_of(arguments.at, ClientTls(arguments.ca, *given) if arguments.ca else None)
    if fault:
        print(f"kvsteer: health: {fault}", file=sys.stderr)
        return 1
    is_default = arguments.at == DEFAULT_EXTPROC
    metrics = arguments.faults or (DEFAULT_METRICS if is_default else None)
    for line in faults_at(metrics) if metrics else ():
        print(f"ready, but: {line}")
    return 0


def _is_envelope(body: object) -> bool:
    return isinstance(body, dict) and "body" in body and "path" in body


if __name__ == "__main__":
    sys.exit(main())
