"""Reads YAML into one checked `Config`, or lists all of its faults in one run.

This module checks each key alone: its name, type and range. Rules between keys are in
`extproc.config.rules`. A duplicate key in a mapping is a fault, although PyYAML accepts it (YAML
1.2.2, section 3.2.1.3: the keys of a mapping are unique).
"""

import functools
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from extproc.base.errors import ConfigError
from extproc.base.tokenizer_files import TokenizerFiles
from extproc.config.fleet_rules import worker_faults
from extproc.config.lines import in_order
from extproc.config.rules import broken_rules
from extproc.config.schema import OFF, Config, ExtProc, Model, WorkerEvents, WorkerSettings
from extproc.config.sections import StoreSettings, largest_number
from extproc.config.wrong_keys import section_with, section_without, until_wrong

T = TypeVar("T")

# Thousands of workers need less; a larger file is taken for a mistake.
MAX_FILE_BYTES = 4 * 1024 * 1024

# Python refuses to print very long numbers.
_SHOWN_BITS = 128

# Variables that shells, Compose and Helm expand, but KVSteer does not.
_VARIABLE = re.compile(r"\$\{\w+[^}]*\}")


class _Foreign(NamedTuple):
    """What is said to a key that another program or a former release has, and which it means."""

    says: str
    meant: str = ""


# Keys of former releases, and vLLM's own names in --kv-events-config, which users may paste here.
_FOREIGN: Mapping[type, Mapping[str, _Foreign]] = {
    WorkerEvents: {
        "endpoint": _Foreign(
            "that is vLLM's name; here it is zmq, with the worker's host for *", "zmq"
        ),
        "replay_endpoint": _Foreign(
            "that is vLLM's name; here it is replay, with the worker's host for *", "replay"
        ),
        **dict.fromkeys(
            ("publisher", "enable_kv_cache_events", "buffer_steps", "hwm", "max_queue_size"),
            _Foreign("only vLLM uses it; leave it out here"),
        ),
    },
    ExtProc: {
        "server": _Foreign("KVSteer has one server now; leave it out"),
    },
    StoreSettings: {
        "grpc": _Foreign("no store publishes over gRPC; its ZMQ publisher is named by zmq", "zmq")
    },
}


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


# A rule, which yields the faults of a configuration.
Rule = Callable[[Config], Iterator[str]]


def load(path: str, processes: int | None = None, further: Iterable[Rule] = ()) -> Config:
    """Returns the configuration in a file, checked.

    processes: overrides its `extproc.processes`. further: rules besides those of each command.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong.
    """
    return parse(_contents(path, MAX_FILE_BYTES), path, processes, further)


def read_text(path: str, most: int) -> str:
    """Returns the text of a file.

    most: largest size in bytes.

    Raises:
        ConfigError: the file cannot be read, is larger, or is not text.
    """
    try:
        return _contents(path, most).decode()
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: is not UTF-8 text"]) from None


def _contents(path: str, most: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {_os_reason(error)}"]) from None
    if len(found) > most:
        raise ConfigError([f"{path}: larger than {most} bytes"])
    return found


def _os_reason(error: OSError) -> str:
    """Returns why a file cannot be read.

    If access is denied, the reason names the user of this process, which containers set.
    """
    if isinstance(error, PermissionError):
        return f"{error.strerror}; this process runs as user {os.geteuid()}"
    return str(error.strerror)


def parse(
    text: str | bytes, name: str, processes: int | None = None, further: Iterable[Rule] = ()
) -> Config:
    """Returns the configuration in a text, checked.

    name: the file's name, for the messages. processes: overrides `extproc.processes`, which is
    checked nevertheless. further: rules besides those of each command.

    Raises:
        ConfigError: the text has faults. The error has all that can be known together, each with
            its line, in their order in the text: rules are left out that read a wrong key.
    """
    raw, doubles = _values(text, name)
    reading = _Reading(doubles)
    config = _with_processes(reading.section(Config, raw, ""), processes)
    faults = [*reading.faults, *broken_rules(config)]
    for rule in (*_FILES, *further):
        faults += until_wrong(rule, config)
    _raise_if_any(faults, text, name)
    return config


def _with_processes(config: Config, processes: int | None) -> Config:
    """Returns a configuration with a number of processes, unless that is None."""
    if processes is None or not hasattr(config, "extproc"):  # a wrong key has no value
        return config
    return section_with(config, "extproc", section_with(config.extproc, "processes", processes))


def _raise_if_any(faults: list[str], text: str | bytes, name: str) -> None:
    """Raises the faults of a text, as many of the first as are shown.

    Raises:
        ConfigError: there are faults.
    """
    if faults:
        shown, more = in_order(text, faults)[:MAX_FAULTS], len(faults) - MAX_FAULTS
        shown += [f"and {more} more faults"] if more > 0 else []
        raise ConfigError([f"{name}: {fault.removeprefix(': ')}" for fault in shown])


def _missing_tokenizers(config: Config) -> Iterator[str]:
    """Yields a fault for each model whose tokenizer is missing or cannot be read."""
    for position, model in enumerate(config.models):
        yield from until_wrong(_missing_tokenizer, f"models[{position}].tokenizer", model)


def _missing_tokenizer(key: str, model: Model) -> Iterator[str]:
    try:
        if isinstance(model.tokenizer, str):
            TokenizerFiles.find(model.tokenizer)
    except PermissionError as error:
        yield f"{key}: {error.filename} cannot be read: {_os_reason(error)}"
    except (FileNotFoundError, ValueError) as error:
        yield f"{key}: {error}"


def _missing_templates(config: Config) -> Iterator[str]:
    """Yields a fault for each file of a chat template that is missing or cannot be read."""
    for position, model in enumerate(config.models):
        yield from until_wrong(_missing_template, f"models[{position}].chat_template", model)


def _missing_template(key: str, model: Model) -> Iterator[str]:
    if model.chat_template is None:
        return
    try:
        if not Path(model.chat_template).is_file():
            yield f"{key}: no such file: {model.chat_template}"
    except PermissionError as error:
        yield f"{key}: {error.filename} cannot be read: {_os_reason(error)}"


# The rules about files that a model names.
_FILES: tuple[Rule, ...] = (_missing_tokenizers, _missing_templates)


def parse_workers(text: str | bytes, name: str, config: Config) -> tuple[WorkerSettings, ...]:
    """Returns the workers in a text, checked: a list in the form of the configuration's `workers`.

    name: the file's name, for the messages. config: lists the models that exist. An empty
    list is valid, an empty file is not.

    Raises:
        ConfigError: the text has faults; the error has all of them.
    """
    raw, doubles = _values(text, name)
    if not isinstance(raw, list):
        raise ConfigError([f"{name}: must be a list of workers, is {_display(raw)}"])
    reading = _Reading(doubles)
    workers = [
        reading.section(WorkerSettings, one, f"[{position}]") for position, one in enumerate(raw)
    ]
    _raise_if_any([*reading.faults, *worker_faults("", workers, config)], text, name)
    return tuple(workers)


def changed_keys(running: object, read: object, path: str = "") -> Iterator[str]:
    """Yields the keys whose values differ, as docs/configuration.md names them, without the values.

    running, read: two versions of one section. A list, such as workers, counts as one key.
    """
    if not is_dataclass(running) or type(running) is not type(read):
        if running != read:
            yield path
        return
    for field in fields(running):
        before, now = getattr(running, field.name), getattr(read, field.name)
        yield from changed_keys(before, now, f"{path}.{field.name}" if path else field.name)


def _values(text: str | bytes, name: str) -> tuple[Any, list[str]]:
    try:
        return values_in(text)
    except ValueError as error:
        raise ConfigError([f"{name}: not YAML: {error}"]) from None


# Most faults that are shown, and the longest key or word that a known one is suggested for.
MAX_FAULTS = 100
_LONGEST_WORD = 60


# Longest mapping that is read as it is, as JSON.
MAX_OBJECT_CHARACTERS = 4_096

# Stands for the value of a wrong key.
_WRONG = object()


class _Reading:
    """Reads sections, and collects the faults that each key has by itself.

    doubles: the faults of keys that are given twice, of which neither value counts.
    """

    def __init__(self, doubles: list[str]) -> None:
        self.faults = list(doubles)
        self._twice = {fault.partition(": ")[0] for fault in doubles}

    def section(self, kind: type[T], raw: object, path: str) -> T:
        """Returns a section as its dataclass, in which wrong keys have no value."""
        known = _keys_of(typing.cast("type", kind))
        if not isinstance(raw, Mapping):
            what = f"must be a mapping, is {_display(raw)}{_as_mapping(kind, raw)}"
            self.faults.append(f"{path or 'configuration'}: {what}")
            return section_without(kind, known, {})
        values: dict[str, object] = {}
        wrong: set[str] = set()
        for key, given in raw.items():
            where = _join(path, key)
            if key not in known:
                meant = self._unknown(kind, key, where)
                wrong |= {meant} - raw.keys()
                continue
            values[key] = self._value(known[key].hint, given, where, known[key].item)
            if values[key] is _WRONG or where in self._twice:
                wrong.add(key)
        for name, one in known.items():
            if name not in raw and name not in wrong and _is_required(one.item):
                self.faults.append(f"{_join(path, name)}: missing")
                wrong.add(name)
        return section_without(kind, wrong, values)

    def _unknown(self, kind: type, key: object, where: str) -> str:
        """Adds the fault of a key that a section does not have; returns the one that it means.

        Returns "" if none can be told.
        """
        meant, hint = "", ""
        if pasted := _FOREIGN.get(kind, {}).get(str(key)):
            meant, hint = pasted.meant, f"; {pasted.says}"
        elif len(self.faults) < MAX_FAULTS:  # others are only counted, since a hint takes 0.1 ms
            meant = _nearest(key, (item.name for item in fields(kind)))
            hint = _suggestion(meant)
        self.faults.append(f"{where}: unknown key{hint}")
        return meant

    def _value(self, hint: object, raw: object, path: str, item: "Field[Any]") -> object:
        """Returns the value of a key, or `_WRONG`."""
        kind, optional = _chosen(hint, raw)
        if raw is None and optional:
            return None
        if typing.get_origin(kind) is typing.Literal:
            return self._word(typing.get_args(kind), raw, path)
        if is_dataclass(kind):
            section: object = self.section(typing.cast("type", kind), raw, path)
            return section if isinstance(raw, Mapping) else _WRONG
        if typing.get_origin(kind) in (tuple, Mapping):
            return self._several(kind, raw, path, item)
        if raw is False and OFF in item.metadata["choices"]:
            raw = OFF  # YAML reads the unquoted word like this
        if fault := _scalar_fault(kind, raw, item):
            return self._wrong(path, fault)
        return float(typing.cast("int", raw)) if kind is float else raw

    def _word(self, words: tuple[str, ...], raw: object, path: str) -> object:
        """Returns a word that is allowed instead of a section, or `_WRONG`."""
        if raw in words:
            return raw
        said = f"must be a mapping, or {' or '.join(words)}, is {_display(raw)}"
        return self._wrong(path, said)

    def _several(self, kind: object, raw: object, path: str, item: "Field[Any]") -> object:
        """Returns a list, or a mapping of no certain keys, or `_WRONG`."""
        if typing.get_origin(kind) is Mapping:
            return self._object(raw, path)
        return self._items(typing.get_args(kind)[0], raw, path, item)

    def _object(self, raw: object, path: str) -> object:
        """Returns a mapping of anything that JSON can say, or `_WRONG`."""
        if not isinstance(raw, Mapping):
            return self._wrong(path, f"must be a mapping, is {_display(raw)}")
        try:
            text = json.dumps(_as_json(raw), allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return self._wrong(path, "must hold only what JSON can say: texts as keys, no dates")
        if len(text) > MAX_OBJECT_CHARACTERS:
            return self._wrong(path, f"must be at most {MAX_OBJECT_CHARACTERS} characters of JSON")
        return json.loads(text)

    def _items(self, kind: object, raw: object, path: str, item: "Field[Any]") -> object:
        """Returns a list.

        A section that is wrong stays in it, so that the others have their places. A list of words
        is wrong if one of them is.
        """
        if not isinstance(raw, list):
            return self._wrong(path, f"must be a list, is {_display(raw)}")
        places = [(f"{path}[{position}]", entry) for position, entry in enumerate(raw)]
        if is_dataclass(kind):
            return tuple(self.section(typing.cast("type", kind), one, at) for at, one in places)
        values = tuple(self._value(kind, one, at, item) for at, one in places)
        return _WRONG if _WRONG in values else values

    def _wrong(self, path: str, fault: str) -> object:
        self.faults.append(f"{path}: {fault}")
        return _WRONG


class _Key(NamedTuple):
    """A key of a section. item: its field. hint: its type."""

    item: "Field[Any]"
    hint: object


@functools.cache
def _keys_of(kind: type) -> Mapping[str, _Key]:
    hints = typing.get_type_hints(kind)
    return {item.name: _Key(item, hints[item.name]) for item in fields(kind)}


def _is_required(item: "Field[Any]") -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _chosen(hint: object, raw: object) -> tuple[object, bool]:
    """Returns the type that a value must have, chosen by its shape, and whether it may be null."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    is_mapping, is_list = isinstance(raw, Mapping), isinstance(raw, list)
    fitting = (
        kind
        for kind in kinds
        if is_dataclass(kind) is is_mapping and (typing.get_origin(kind) is tuple) is is_list
    )
    kind = next(fitting, kinds[0])
    return kind, len(kinds) < len(typing.get_args(hint))


def _scalar_fault(kind: object, raw: object, item: "Field[Any]") -> str | None:
    is_number = kind is float and type(raw) in (int, float)
    if type(raw) is not kind and not is_number:
        quotes = " to YAML; put it in quotes" if kind is str and _is_plain(raw) else ""
        return f"must be {_KINDS[typing.cast('type', kind)]}, is {_display(raw)}{quotes}"
    choices = item.metadata["choices"]
    if choices and raw not in choices:
        near = _suggestion(_nearest(raw, choices))
        return f"must be one of {', '.join(choices)}, is {raw!r}{near}"
    if is_number or type(raw) is int:
        return _range_fault(typing.cast("float", raw), item)
    if raw == "" and item.default != "":
        return "must not be empty"
    if type(raw) is str and (variable := _VARIABLE.search(raw)):
        return f"{variable[0][:60]} is not expanded here; write its value, or expand the file first"
    return None


def _range_fault(raw: float, item: "Field[Any]") -> str | None:
    minimum, maximum = item.metadata["minimum"], item.metadata["maximum"]
    if not raw >= minimum:  # also false for .nan
        return f"must be at least {minimum}, is {_display(raw)}"
    if raw > (maximum or largest_number(item.name)):
        return f"must be at most {maximum or largest_number(item.name)}, is {_display(raw)}"
    return None


def _as_json(raw: object) -> object:
    """Returns a value with texts as the keys of its mappings.

    Raises:
        TypeError: another key.
    """
    if isinstance(raw, Mapping):
        if not all(isinstance(name, str) for name in raw):
            raise TypeError
        return {name: _as_json(value) for name, value in raw.items()}
    return [_as_json(one) for one in raw] if isinstance(raw, list) else raw


def _is_plain(raw: object) -> bool:
    return raw is not None and not isinstance(raw, (list, Mapping))


def _display(raw: object) -> str:
    if raw is None:
        return "empty"
    if isinstance(raw, Mapping):
        return "a mapping"
    if isinstance(raw, int) and raw.bit_length() > _SHOWN_BITS:
        return "a huge number"
    return "a list" if isinstance(raw, list) else repr(raw)[:60]


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _nearest(word: object, known: Iterable[str]) -> str:
    """Returns the known word that this one most likely means, "" if there is none."""
    text = str(word)
    if len(text) > _LONGEST_WORD:
        return ""
    import difflib  # only for a file with a fault

    return next(iter(difflib.get_close_matches(text, list(known), n=1)), "")


def _suggestion(word: str) -> str:
    return f"; did you mean {word}?" if word else ""


def _as_mapping(kind: type, raw: object) -> str:
    """Returns a hint at the key of the section that accepts this single word; "" if none does."""
    if not isinstance(raw, str | int):  # a short text of aliases may stand for a huge list
        return ""
    word = str(raw).replace("-", "_")
    names = [item.name for item in fields(kind) if word in item.metadata["choices"]]
    return f"; did you mean {{{names[0]}: {word}}}?" if names else ""


# "<<" merges the keys of other mappings; PyYAML accepts several.
_MERGE = "tag:yaml.org,2002:merge"

# Most keys of a mapping, merged ones included: merges of merges multiply, unlike other aliases,
# which stand for one value however often they are used.
MAX_MERGED = 100_000


class _Loader(yaml.SafeLoader):
    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGED:
            raise ValueError(f"a mapping has more than {MAX_MERGED} keys, merged ones included")


def values_in(text: str | bytes) -> tuple[Any, list[str]]:
    """Returns the values of a YAML text, and its duplicate keys, each as "key: what is wrong".

    Raises:
        ValueError: the text is not YAML; the message says where and why.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None, []
        doubles = list(_doubles(root, "", set()))
        return loader.construct_document(root), doubles
    except (LookupError, AttributeError):  # PyYAML raises these for a text such as "!!bool x"
        raise ValueError("a value does not fit its tag") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(_error_text(error)) from None


def _doubles(node: yaml.Node, path: str, seen: set[int]) -> Iterator[str]:
    """Yields the duplicate keys.

    seen: the nodes visited before; an alias leads back to one, perhaps in a circle.
    """
    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for position, one in enumerate(node.value):
            yield from _doubles(one, f"{path}[{position}]", seen)
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else "?"
        where = f"{path}.{name}" if path else name
        kind, line = (key.tag, name), key.start_mark.line + 1
        if kind in lines:
            yield f"{where}: given in line {lines[kind]} and again in line {line}"
        elif isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            lines[kind] = line
        yield from _doubles(value, where, seen)


def _error_text(error: Exception) -> str:
    """Returns the error on one line, without PyYAML's names for strings."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
        why = ", ".join(part for part in (error.context, error.problem) if part)
        return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(why.split())}"
    said = " ".join(str(error).split())
    for name in ('in "<byte string>", ', 'in "<unicode string>", '):
        said = said.replace(name, "at ")
    return said
