import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.compression import is_compressed

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le")


@given(st.binary(max_size=64))
def test_compressed_body_is_known_by_its_beginning(body: bytes) -> None:
    assert is_compressed(gzip.compress(body), "")
    assert is_compressed(zlib.compress(body), "")


@pytest.mark.parametrize("level", range(10))
def test_deflated_body_is_known_at_every_level(level: int) -> None:
    assert is_compressed(zlib.compress(b"{}", level), "")


def test_other_codings_are_known_by_their_frame_or_their_header() -> None:
    assert is_compressed(b"\x28\xb5\x2f\xfd\x04", "")
    assert is_compressed(b"\x0b\x02\x80", "br")


@given(st.none() | st.integers() | st.lists(st.text()), st.sampled_from(ENCODINGS))
def test_json_is_not_taken_for_a_compressed_body(value: object, encoding: str) -> None:
    assert not is_compressed(json.dumps(value).encode(encoding), "")
