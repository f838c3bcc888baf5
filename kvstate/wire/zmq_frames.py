"""ZMQ messages of vLLM, SGLang and TensorRT-LLM: [topic, sequence number, payload].

The number is 8 bytes big-endian; `vllm.distributed.kv_events.ZmqEventPublisher` has the layout.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvstate.errors import WireError

# Sequence number of the message that ends a replay: -1 in 8 bytes.
END_OF_REPLAY = 0xFFFF_FFFF_FFFF_FFFF


class Frames(NamedTuple):
    """One ZMQ message, taken apart."""

    sequence: int
    payload: bytes

    @property
    def ends_replay(self) -> bool:
        """Whether this is the marker after the last batch of a replay."""
        return self.sequence == END_OF_REPLAY and not self.payload


def parse_frames(frames: Sequence[bytes]) -> Frames:
    """Takes a message apart, live or replayed.

    Counted from the end: replays put an empty frame in front, and since vLLM 0.26, SGLang 0.5.22
    and in TensorRT-LLM the topic too.

    Raises:
        WireError: fewer than two frames, or a sequence number that is not 8 bytes.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:  # noqa: PLR2004 - the layout above
        raise WireError(f"message of {len(frames)} frames has no sequence number")
    return Frames(int.from_bytes(frames[-2], "big"), frames[-1])
