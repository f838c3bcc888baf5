"""The name of a member in a body of JSON."""

import pytest

from kvstate.scan import named


def test_named_refuses_what_is_no_member() -> None:
    with pytest.raises(ValueError, match="not a member"):
        named(b"[1]", (0, 3))
