"""`kvsteer top`: the fleet and the last decisions of a running router, on a terminal."""

import shutil
import sys
import textwrap
import time
from typing import TextIO

from extproc.admin_client import ask
from extproc.errors import StartError
from extproc.top_screen import screen

REFRESH_SECONDS = 2.0

# Without a terminal, as many decisions as are of use in a report.
DECISIONS_ONCE = 20

# ECMA-48: cursor to the top left; erase to the end of the line, of the screen; another screen, and
# back (xterm).
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_OTHER_SCREEN, _SCREEN_AGAIN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def run(admin: str, *, once: bool, out: TextIO | None = None) -> int:
    """Shows it again and again until it is interrupted, or once; the exit status.

    admin: a router's admin server. Where `out` is no terminal, it is shown once.

    Raises:
        StartError: the router cannot be asked.
    """
    out = sys.stdout if out is None else out
    if once or not out.isatty():
        columns = shutil.get_terminal_size().columns if out.isatty() else 200
        print("\n".join(_asked(admin, (columns, 0))), file=out)
        return 0
    _asked(admin, (80, 24))  # a wrong URL is told in one line, and not on the other screen
    out.write(_OTHER_SCREEN)
    try:
        while True:
            _draw(admin, out)
            time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt:
        return 0
    finally:
        out.write(_SCREEN_AGAIN)
        out.flush()


def _draw(admin: str, out: TextIO) -> None:
    size = shutil.get_terminal_size()
    try:
        lines = _asked(admin, (size.columns, size.lines))
    except StartError as error:
        lines = [*textwrap.wrap(str(error), size.columns), "trying again; Ctrl-C ends"]
    shown = f"{_END_OF_LINE}\n".join(lines[: size.lines - 1])
    out.write(f"{_HOME}{shown}{_END_OF_LINE}\n{_END_OF_SCREEN}")
    out.flush()


def _asked(admin: str, size: tuple[int, int]) -> list[str]:
    decisions, events, workers = (
        ask("top", admin, path) for path in ("/decisions", "/events", "/workers")
    )
    try:
        shown = decisions["decisions"][0 if size[1] else -DECISIONS_ONCE :]
        return screen(workers, shown, size, events_enabled=events["enabled"])
    except (KeyError, TypeError, AttributeError) as error:
        raise StartError(f"top: {admin}: answers otherwise than this version does") from error
