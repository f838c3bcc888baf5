"""Log records on standard error, as lines of text or as JSON."""

import json
import logging
import sys
import traceback
from collections import OrderedDict
from datetime import UTC, datetime


def log_fault(log: logging.Logger, what: str, error: Exception) -> None:
    """Logs the type and place of an error, but not its message, which may quote a request.

    what: with %s for the type.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    kind = type(error).__name__
    log.error("%s\n%s", what % kind, frames)


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: int | None) -> None:
        super().__init__()
        self._own = {} if process is None else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        decision = getattr(record, "decision", None)  # of the decision log: as fields, not as text
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage() if decision is None else "decision",
            **self._own,
        }
        if decision is not None:
            line["decision"] = decision
        for name in ("trace_id", "request_id"):  # given as `extra` in records about a request
            if known := getattr(record, name, ""):
                line[name] = known
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


# Most lines of one kind in a minute, from loggers that outsiders can have write; further ones are
# only counted.
MAX_LINES = 20

# These loggers, and how many of a line's first values, besides its text, make its kind: the worker,
# or the worker and its rank. What clients and other routers send makes none.
LIMITED = {
    "kvsteer.admin": 0,
    "kvsteer.bridge": 0,
    "kvsteer.decision": 0,
    "kvsteer.discovery": 1,
    "kvsteer.extproc": 0,
    "kvsteer.feed": 2,
    "kvsteer.sharing": 0,
    "kvsteer.tokenizing": 1,
    "kvsteer.tokens": 1,
    "kvsteer.tracing": 0,
    "kvsteer.workers": 1,
}
_WINDOW_SECONDS = 60.0
MAX_KINDS = 4096


class _LineCount:
    """The number of lines of one kind since a moment."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.count = 0


class RateLimitFilter(logging.Filter):
    """Drops records that are too frequent, of loggers that outsiders can have write.

    A peer that breaks the protocol, a broken publisher, or a router that knows the secret and
    changes its name, may cause many. The next record of that kind says how many were dropped.

    kinds: the last `max_kinds` kinds of records.
    """

    def __init__(self, max_kinds: int = MAX_KINDS) -> None:
        super().__init__()
        self._max_kinds = max_kinds
        self.kinds: OrderedDict[object, _LineCount] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether to write a record."""
        shown_arguments = LIMITED.get(record.name)
        if shown_arguments is None or record.levelno < logging.INFO:
            return True
        args = record.args if isinstance(record.args, tuple) else ()
        kind = (record.msg, *map(str, args[:shown_arguments]))
        lines = self.kinds.get(kind)
        left_out = 0
        if lines is None or record.created - lines.since >= _WINDOW_SECONDS:
            left_out = max(0, lines.count - MAX_LINES) if lines else 0
            lines = self.kinds[kind] = _LineCount(record.created)
            self.kinds.move_to_end(kind)
        if len(self.kinds) > self._max_kinds:
            self.kinds.popitem(last=False)
        lines.count += 1
        if left_out:
            record.msg, record.args = f"{record.msg} (%d more were left out)", (*args, left_out)
        return lines.count <= MAX_LINES


def configure(level: str, style: str, process: int | None = None) -> None:
    """Sets up KVSteer's loggers, and how warnings of libraries look.

    level, style: log.level and log.format of the configuration. process: the number of this
    process, written with each record; None if there is only one.
    """
    ours = logging.getLogger("kvsteer")
    ours.handlers = [_handler(style, process)]
    ours.handlers[0].addFilter(RateLimitFilter())
    ours.setLevel(level.upper())
    # for loggers that have no handler: those of libraries, as OpenTelemetry's
    logging.lastResort = _handler(style, process)
    logging.lastResort.setLevel(logging.WARNING)


def _handler(style: str, process: int | None) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        handler.setFormatter(_JsonFormatter(process))
    else:
        number = "" if process is None else f"[{process}] "
        line = f"%(asctime)s %(levelname)-7s {number}%(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line))
    return handler
