"""Writes a workload as a trace in Mooncake's format, for benchmarks/routing.py --trace.

python benchmarks/routing_trace.py FILE [--seed N]
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from routing_workloads import mixed, multi_turn, shared_prefix, single_shot

from kvtools.whatif.engines import BLOCK_TOKENS, Request
from kvtools.whatif.traces import MOONCAKE_BLOCK_TOKENS

WORKLOAD = mixed(shared_prefix(8, 60), multi_turn(2, 60), single_shot(6, 60))


def main() -> None:
    """Writes a mix of shared prefixes, chats and single questions."""
    parser = argparse.ArgumentParser(description="Writes a trace in Mooncake's format.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    requests = WORKLOAD(Random(wanted.seed))
    wanted.file.write_text("".join(f"{line}\n" for line in lines_of(requests)))


def lines_of(requests: Sequence[Request]) -> Iterator[str]:
    """Yields the requests as JSON; a block's id identifies the prompt up to the block's end."""
    ids: dict[tuple[int, ...], int] = {}
    step = MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS
    for request in requests:
        chain: list[int] = []
        for start in range(0, len(request.blocks), step):
            before = chain[-1:] or [-1]
            block = (*before, *request.blocks[start : start + step])
            chain.append(ids.setdefault(block, len(ids)))
        yield json.dumps(
            {
                "timestamp": round(request.at * 1000),
                "input_length": request.tokens,
                "output_length": request.answer_tokens,
                "hash_ids": chain,
            }
        )


if __name__ == "__main__":
    main()
