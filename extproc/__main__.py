"""The command line: `kvsteer`, or `python -m extproc`.

Each command imports what it needs when it runs, which keeps the others fast.
"""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from extproc.completion import SHELLS
from extproc.errors import ConfigError, StartError

if TYPE_CHECKING:
    from extproc.config.schema import Config

DEFAULT_ADMIN = "http://127.0.0.1:9090"
DEFAULT_EXTPROC = "127.0.0.1:9002"

# As `extproc.processes` may be.
MAX_PROCESSES = 64

# The status that a shell gives to a command that SIGPIPE ended.
_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, 1 if it failed, 2 if it was misused."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parsed = _parser(given[0] if given else "").parse_args(given)
    try:
        status = int(parsed.run(parsed))
        sys.stdout.flush()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except StartError as error:
        print(f"kvsteer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return status


# Every command, under what a user wants of it.
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
    },
    "Simulate": {
        "worker": "run one simulated worker",
        "traffic": "send simulated chats to an Envoy",
    },
    "Shell": {
        "completion": "print a script that completes commands and options",
    },
}

_EVERY = "every command"


def _parser(command: str) -> argparse.ArgumentParser:
    """Returns the parser; command: the one given, whose options alone are loaded."""
    width = max(len(name) for group in _GROUPS.values() for name in group)
    listed = "".join(
        f"\n{title}:\n" + "".join(f"  {name:<{width}}  {told}\n" for name, told in group.items())
        for title, group in _GROUPS.items()
    )
    parser = argparse.ArgumentParser(
        prog="kvsteer",
        usage="kvsteer COMMAND ...",
        description="Routes LLM requests behind Envoy to the worker that holds their prefix.",
        epilog=f"{listed.strip()}\n\n`kvsteer COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show version and core")
    commands = parser.add_subparsers(
        required=True, prog="kvsteer", metavar="COMMAND", help=argparse.SUPPRESS
    )
    made = {
        name: commands.add_parser(name, description=f"{told[0].upper()}{told[1:]}.")
        for group in _GROUPS.values()
        for name, told in group.items()
    }
    _add_configured(made)
    _add_questions(made)
    _add_others(made)
    _add_loaded(made, command)
    return parser


def _add_configured(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Adds the options of the commands that read a configuration."""
    made["serve"].set_defaults(run=_serve)
    made["check"].set_defaults(run=_check)
    _add_patch_arguments(made["envoy"])
    made["envoy"].set_defaults(run=_envoy)
    for configured in (made["serve"], made["check"], made["envoy"]):
        configured.add_argument("--config", required=True, metavar="FILE", help="the configuration")
        configured.add_argument(
            "--processes", type=_count, metavar="N", help="instead of its extproc.processes"
        )
    made["serve"].add_argument("--member", help=argparse.SUPPRESS)  # given by the parent of several


def _add_others(made: Mapping[str, argparse.ArgumentParser]) -> None:
    health = made["health"]
    health.add_argument(
        "--at", default=DEFAULT_EXTPROC, metavar="ADDRESS", help="its extproc.listen"
    )
    health.add_argument("--ca", metavar="FILE", help="use TLS, and trust these authorities")
    health.add_argument("--name", help="the name in its certificate, where --at has another")
    health.add_argument("--certificate", metavar="FILE", help="our own, where it wants one")
    health.add_argument("--key", metavar="FILE", help="the private key of that")
    health.set_defaults(run=_health)

    demo = made["demo"]
    demo.add_argument("--workers", type=int, default=3, metavar="N", help="simulated workers")
    demo.add_argument("--port", type=int, default=10000, metavar="P", help="Envoy's port")
    demo.add_argument("--check", action="store_true", help="send a sample workload, judge, exit")
    demo.set_defaults(run=_demo)

    made["completion"].add_argument("shell", choices=SHELLS, help="the shell that reads it")
    made["completion"].set_defaults(run=_completion)


def _add_loaded(made: Mapping[str, argparse.ArgumentParser], command: str) -> None:
    """Adds the commands whose modules declare their options; loads that of the one given."""
    if command in ("doctor", _EVERY):
        from extproc.doctor import doctor  # noqa: PLC0415

        doctor.add_arguments(made["doctor"])
        made["doctor"].set_defaults(run=doctor.run)
    if command in ("whatif", _EVERY):
        from extproc.whatif import command as whatif  # noqa: PLC0415

        whatif.add_arguments(made["whatif"])
        made["whatif"].set_defaults(run=whatif.run)
    if command in ("bridge", _EVERY):
        from extproc import bridge_cli  # noqa: PLC0415

        bridge_cli.add_arguments(made["bridge"])
        made["bridge"].set_defaults(run=bridge_cli.run)
    if command in ("worker", _EVERY):
        from simulator import cli as simulator  # noqa: PLC0415

        simulator.add_arguments(made["worker"])
        made["worker"].set_defaults(run=simulator.run)
    if command in ("traffic", _EVERY):
        from simulator import traffic  # noqa: PLC0415

        traffic.add_arguments(made["traffic"])
        made["traffic"].set_defaults(run=traffic.run)


def _add_questions(made: Mapping[str, argparse.ArgumentParser]) -> None:
    """Adds the options of the commands that ask the admin server of a running router."""
    explain, top, report = made["explain"], made["top"], made["report"]
    explain.description = (
        "Shows where a request would go, and why. Reads the request's JSON body from standard"
        " input; nothing is sent to a worker."
    )
    for asks in (explain, top):
        asks.add_argument(
            "--admin", default=DEFAULT_ADMIN, metavar="URL", help="a router's admin server"
        )
    explain.add_argument(
        "--path", default="/v1/chat/completions", metavar="URL-PATH", help="the request's path"
    )
    explain.add_argument("--json", action="store_true", help="print all that is known, as JSON")
    explain.set_defaults(run=_explain)

    top.add_argument("--once", action="store_true", help="show it once, and exit")
    top.set_defaults(run=_top)

    report.add_argument(
        *("--admin", "--url"), default=DEFAULT_ADMIN, metavar="URL", help="a router's admin server"
    )
    report.add_argument("--since", metavar="TIME", help="only the last 90m, 12h or 7d")
    form = report.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument("--html", metavar="FILE", help="write it as a page with plots to FILE")
    report.set_defaults(run=_report)


def _add_patch_arguments(envoy: argparse.ArgumentParser) -> None:
    group = envoy.add_argument_group(
        "add KVSteer to an Envoy that you run",
        "The file itself is left as it is. Notes go to standard error.",
    )
    group.add_argument(
        "--patch", metavar="FILE", help="print this envoy.yaml (or JSON) with KVSteer added"
    )
    group.add_argument("--diff", action="store_true", help="print what would change, as a diff")
    group.add_argument(
        "--cluster",
        action="append",
        default=[],
        metavar="NAME",
        help="the workers' cluster, if it cannot be told from their addresses; for each model, "
        "with several",
    )
    group.add_argument("--listener", metavar="NAME", help="change this listener alone")
    group.add_argument(
        "--access-log", action="store_true", help="add two fields to its access logs in JSON"
    )


class _ShowVersion(argparse.Action):
    """Prints the version, and whether the index core and the request path run compiled."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from extproc.request_path import CHOICE  # noqa: PLC0415
        from kvstate.index import default_core_name, plain_core_warning  # noqa: PLC0415

        told = f"{default_core_name()} index core, {CHOICE.name} request path"
        print(f"kvsteer {version('kvsteer')} ({told})")
        if CHOICE.reason:
            print(f"note: the request path runs plain: {CHOICE.reason}")
        if warning := plain_core_warning():
            print(f"warning: {warning}")
        parser.exit()


def _count(text: str) -> int:
    """Returns a number of processes.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MAX_PROCESSES}, is {text!r}")
    return int(text)


def _serve(arguments: argparse.Namespace) -> int:
    from extproc.config.reader import load  # noqa: PLC0415

    config = load(arguments.config, arguments.processes)
    if config.extproc.processes > 1 and arguments.member is None:
        return _serve_several(arguments.config, config)
    from extproc.app import serve  # noqa: PLC0415
    from extproc.event_loop import run  # noqa: PLC0415
    from extproc.processes import Member  # noqa: PLC0415

    member = None if arguments.member is None else Member.parse(arguments.member)
    run(serve(arguments.config, config, member))
    return 0


def _serve_several(path: str, config: "Config") -> int:
    import asyncio  # noqa: PLC0415

    from extproc import logs, processes  # noqa: PLC0415

    if config.recorder.file is not None:
        from extproc.recorder import share_secret  # noqa: PLC0415

        share_secret(os.environ)

    logs.configure(config.log.level, config.log.format)
    return asyncio.run(processes.serve(path, config.extproc.processes))


def _check(arguments: argparse.Namespace) -> int:
    from extproc.config.reader import load  # noqa: PLC0415
    from extproc.config.rules import doubts  # noqa: PLC0415
    from kvstate.index import plain_core_warning  # noqa: PLC0415

    config = load(arguments.config, arguments.processes)
    for note in filter(None, (*doubts(config, os.path.exists), plain_core_warning())):
        print(f"{arguments.config}: note: {note}")
    print(f"{arguments.config}: ok")
    return 0


def _envoy(arguments: argparse.Namespace) -> int:
    from extproc.config.reader import load  # noqa: PLC0415

    chosen = arguments.diff or arguments.cluster or arguments.listener or arguments.access_log
    if chosen and arguments.patch is None:
        message = "--diff, --cluster, --listener and --access-log belong to --patch"
        print(f"kvsteer: envoy: {message}", file=sys.stderr)
        return 2
    try:
        from extproc.envoy_config import render  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("betterproto2", "envoy_data_plane"):
            raise
        raise StartError("envoy: needs the extra: pip install 'kvsteer[envoy]'") from None
    config = load(arguments.config, arguments.processes)
    if arguments.patch is not None:
        return _patch(arguments, config)
    print(render(config), end="")
    return 0


def _patch(arguments: argparse.Namespace, config: "Config") -> int:
    from extproc.config.reader import read_text  # noqa: PLC0415
    from extproc.envoy_patch import Choice, difference, patched  # noqa: PLC0415
    from extproc.yaml_edit import MAX_CHARACTERS  # noqa: PLC0415

    name = arguments.patch
    text = read_text(name, MAX_CHARACTERS)
    choice = Choice(tuple(arguments.cluster), arguments.listener, arguments.access_log)
    patch = patched(text, name, config, choice)
    sys.stdout.write(difference(text, patch.text, name) if arguments.diff else patch.text)
    for note in patch.notes:
        print(f"{name}: note: {note}", file=sys.stderr)
    if patch.text == text:
        print(f"{name}: KVSteer is in it already; nothing changed", file=sys.stderr)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from extproc.demo import run  # noqa: PLC0415

    return run(workers=arguments.workers, port=arguments.port, check=arguments.check)


def _explain(arguments: argparse.Namespace) -> int:
    from extproc.admin_client import ask  # noqa: PLC0415

    if sys.stdin.isatty():
        print("reads a request's body, as JSON, from standard input", file=sys.stderr)
    try:
        body = json.load(sys.stdin)
    except (ValueError, RecursionError) as error:
        print(f"kvsteer: explain: standard input is not JSON: {error}", file=sys.stderr)
        return 2
    # a whole envelope is taken as it is, so that recorded ones can be piped in
    envelope = body if _is_envelope(body) else {"path": arguments.path, "headers": {}, "body": body}
    told = ask("explain", arguments.admin, "/explain", envelope)
    if arguments.json:
        print(json.dumps(told, indent=2))
        return 0
    from extproc.terminal import cut, explained  # noqa: PLC0415

    columns = get_terminal_size().columns if sys.stdout.isatty() else None
    try:
        lines = explained(told)
    except (KeyError, TypeError) as error:
        words = f"explain: {arguments.admin}: answers otherwise than this version does; try --json"
        raise StartError(words) from error
    sentence, *table = lines
    print(sentence if columns is None else "\n".join(textwrap.wrap(sentence, columns)))
    for line in table:
        print(line if columns is None else cut(line, columns))
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    from extproc.completion import commands_of, script  # noqa: PLC0415

    print(script(arguments.shell, commands_of(_parser(_EVERY))), end="")
    return 0


def _top(arguments: argparse.Namespace) -> int:
    from extproc.top import run  # noqa: PLC0415

    return run(arguments.admin, once=arguments.once)


def _report(arguments: argparse.Namespace) -> int:
    from extproc.admin_client import fetch  # noqa: PLC0415
    from extproc.terminal import plain  # noqa: PLC0415

    form = "json" if arguments.json else "html" if arguments.html else "text"
    query = {"format": form, **({"since": arguments.since} if arguments.since else {})}
    told = fetch("report", arguments.admin, f"/report?{urlencode(query)}")
    if arguments.html:
        try:
            Path(arguments.html).write_bytes(told)
        except OSError as error:
            raise StartError(f"report: {arguments.html}: {error.strerror}") from None
        return 0
    print("\n".join(plain(line) for line in told.decode(errors="replace").split("\n")), end="")
    return 0


def _health(arguments: argparse.Namespace) -> int:
    from extproc.health import ClientTls, fault_of  # noqa: PLC0415

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
    return 1 if fault else 0


def _is_envelope(body: object) -> bool:
    return isinstance(body, dict) and "body" in body and "path" in body


if __name__ == "__main__":
    sys.exit(main())
