"""`kvsteer worker`: runs one simulated worker until it is stopped."""

import argparse
import asyncio
import math
import signal
import sys
from pathlib import Path

from kvtools.simulator.dialects import DIALECTS
from kvtools.simulator.server import running
from kvtools.simulator.settings import TINY_MODEL, Settings
from kvtools.simulator.worker import SimulatedWorker

_NOWHERE = "none"
_REPLAY_LIMIT = "messages of a replay queued for a slow reader; 0: no limit"
_ROLES = "which part of requests it takes"
_SPEED = "tokens that one worker computes per second (default: no delay)"
_RATE = "transfer speed of blocks to this worker (default: no delay)"
_WAIT = "seconds to wait for the other worker of a request"
_VERSION = "release that it names, as in 0.32.0 (default: that of the dialect)"
_DIALECTS = f"engine and release to imitate: {', '.join(DIALECTS)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvsteer worker` to its parser."""
    parser.set_defaults(run=run)
    defaults = Settings()
    add = parser.add_argument
    add("--listen", default="127.0.0.1:8001", help="host:port of the API; port 0: any free one")
    add("--name", help="sent as x-worker with every response (default: host:port)")
    add("--dialect", choices=DIALECTS, default=defaults.dialect, metavar="NAME", help=_DIALECTS)
    add("--engine-version", metavar="VERSION", help=_VERSION)
    add("--rust-front-end", action="store_true", help="the paths of the engine's Rust front end")
    add("--ranks", type=int, default=defaults.ranks, help="data-parallel ranks, each with a cache")
    add("--model", default=defaults.model, help="the name requests use")
    add(
        "--lora",
        action="append",
        default=[],
        metavar="NAME",
        help="name of an adapter; may be repeated",
    )
    add("--model-dir", type=Path, default=TINY_MODEL, help="tokenizer and chat template")
    add("--chat-template", type=Path, help="a template instead of the model's own")
    add("--block-size", type=int, default=defaults.block_size_tokens, help="tokens per block")
    add("--blocks", type=int, default=defaults.blocks, help="number of blocks in the cache")
    add("--bigrams", action="store_true", help="SGLang: blocks of pairs of tokens, as with EAGLE")
    add(
        "--host-blocks",
        type=int,
        default=defaults.host_blocks,
        help="number of evicted blocks kept in host memory",
    )
    add("--placeholders", action="store_true", help="vLLM: announce kept blocks by hashes alone")
    add(
        "--max-model-len",
        type=int,
        default=defaults.max_model_len_tokens,
        help="most tokens of a request",
    )
    add("--events", default="tcp://127.0.0.1:5557", help="ZMQ endpoint of KV-cache events, or none")
    add(
        "--connect",
        action="store_true",
        help="connect to the events endpoint instead of binding it",
    )
    add("--replay", default="tcp://127.0.0.1:5558", help="ZMQ endpoint for replays, or none")
    add("--load", default=_NOWHERE, help="ZMQ endpoint of its load (SGLang), or none")
    add("--topic", default=defaults.topic, help="topic of the events")
    add(
        "--buffer-steps",
        type=int,
        default=defaults.buffer_batches,
        help="number of batches kept for replays",
    )
    add("--replay-limit", type=int, default=defaults.replay_limit_messages, help=_REPLAY_LIMIT)
    add(
        "--drain-events",
        type=int,
        default=defaults.drain_events,
        help="TensorRT-LLM: number of events kept",
    )
    add("--misbehave", action="store_true", help="serve POST /misbehave, which injects faults")
    for phase in ("prefill", "decode"):
        name = f"--{phase}-tokens-per-second"
        add(name, type=float, default=math.inf, metavar="RATE", help=_SPEED)
    add("--role", choices=("prefill", "decode", "both"), default=defaults.role, help=_ROLES)
    add("--transfer", metavar="HOST:PORT", help="address for fetching computed blocks (prefill)")
    add("--transfer-tokens-per-second", type=float, default=math.inf, metavar="RATE", help=_RATE)
    add("--transfer-timeout", type=float, default=defaults.transfer_timeout_seconds, help=_WAIT)
    add(
        "--max-running",
        type=int,
        default=defaults.max_running_requests,
        help="most requests that run at once",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status: 1 if it could not start."""
    try:
        asyncio.run(_serve(settings_of(arguments)))
    except (OSError, ValueError) as error:
        print(f"worker: {_in_words(error)}", file=sys.stderr)
        return 1
    return 0


def _in_words(error: OSError | ValueError) -> str:
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Returns the settings that the options name."""
    events, replay = _endpoint(arguments.events), _endpoint(arguments.replay)
    return Settings(
        listen=arguments.listen,
        name=arguments.name,
        dialect=arguments.dialect,
        engine_version=arguments.engine_version,
        rust_front_end=arguments.rust_front_end,
        ranks=arguments.ranks,
        model=arguments.model,
        loras=tuple(arguments.lora),
        model_dir=arguments.model_dir,
        chat_template=arguments.chat_template,
        block_size_tokens=arguments.block_size,
        blocks=arguments.blocks,
        bigrams=arguments.bigrams,
        host_blocks=arguments.host_blocks,
        placeholders=arguments.placeholders,
        max_model_len_tokens=arguments.max_model_len,
        events_endpoint=events,
        connect=arguments.connect,
        # Without published events, none are kept for replays.
        replay_endpoint=replay if events else None,
        load_endpoint=_endpoint(arguments.load),
        topic=arguments.topic,
        buffer_batches=arguments.buffer_steps,
        replay_limit_messages=arguments.replay_limit,
        drain_events=arguments.drain_events,
        misbehave=arguments.misbehave,
        prefill_tokens_per_second=arguments.prefill_tokens_per_second,
        decode_tokens_per_second=arguments.decode_tokens_per_second,
        max_running_requests=arguments.max_running,
        role=arguments.role,
        transfer_listen=arguments.transfer,
        transfer_tokens_per_second=arguments.transfer_tokens_per_second,
        transfer_timeout_seconds=arguments.transfer_timeout,
    )


def _endpoint(argument: str) -> str | None:
    return None if argument == _NOWHERE else argument


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as worker:
        print(greeting(worker), flush=True)
        await stop.wait()


def greeting(worker: SimulatedWorker) -> str:
    """Returns the line that a worker prints once it listens."""
    parts = [f"worker {worker.name} listening on {worker.url}"]
    if worker.events_endpoints:
        parts.append(f"events {' '.join(worker.events_endpoints)}")
    if worker.replay_endpoints:
        parts.append(f"replay {' '.join(worker.replay_endpoints)}")
    if worker.load_endpoints:
        parts.append(f"load {' '.join(worker.load_endpoints)}")
    return ", ".join(parts)
