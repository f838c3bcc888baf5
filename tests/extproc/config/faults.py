"""What is wrong with a configuration, for tests."""

import re

import pytest

from extproc.base.errors import ConfigError
from extproc.config.reader import parse


def faults_with_lines(text: str | bytes) -> list[str]:
    """The faults of a configuration, of which there are some."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "c")
    return [fault.removeprefix("c: ") for fault in caught.value.faults]


def faults(text: str | bytes) -> list[str]:
    """The same without their lines."""
    return [re.sub(r" \(line [^)]*\)$", "", fault) for fault in faults_with_lines(text)]
