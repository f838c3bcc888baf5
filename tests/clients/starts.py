"""How each coding agent is started: its words, variables and settings for a model at an address.

`STARTS` are the clients of `make clients`, with the API that each of them takes first; docs tell
users the same. `OTHER_STARTS` are the other clients and APIs that `tests.clients.newest` runs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# What tests/clients and docs/coding-agents.md call the model.
MODEL = "tiny"

CONTEXT_TOKENS = 262_144

# Nothing listens at this proxy: clients that ask their makers' servers get no answer. Qwen Code
# would use it for the model's address, too.
OFFLINE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}

_PROGRAMS = Path(__file__).with_name("library_programs.py")


class Start(NamedTuple):
    """How a client is started: words behind its program, variables, and files in its home.

    again: the words with which it goes on with its last conversation; the text comes last in both.
    first: words that are to be run once before all others, () for none.
    """

    arguments: Sequence[str]
    again: Sequence[str]
    variables: Mapping[str, str]
    files: Mapping[str, str]
    first: Sequence[str] = ()


Starting = Callable[[str], Start]


class Client(NamedTuple):
    """A client with one of its APIs.

    package: its name in `tests.clients.install`. goes_on: whether it can be asked again.
    """

    package: str
    start: Starting
    goes_on: bool = True


def _claude_code(url: str) -> Start:
    names = ("OPUS", "SONNET", "HAIKU")
    models = {f"ANTHROPIC_DEFAULT_{name}_MODEL": MODEL for name in names}
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "my-token",
        "ANTHROPIC_MODEL": MODEL,
        **models,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
        **OFFLINE,
    }
    flags = ["-p", "--dangerously-skip-permissions"]
    return Start(flags, ["-c", *flags], variables, {})


def _codex(url: str) -> Start:
    config = f"""model = "{MODEL}"
model_provider = "mine"

[model_providers.mine]
name = "mine"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "MY_TOKEN"
"""
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    variables = {"MY_TOKEN": "my-token", **OFFLINE}
    again = ["exec", *flags, "resume", "--last"]
    return Start(["exec", *flags], again, variables, {".codex/config.toml": config})


def _opencode_by(package: str) -> Starting:
    """opencode with one of its libraries of providers, each of which takes another API."""

    def start(url: str) -> Start:
        options = {"baseURL": f"{url}/v1", "apiKey": "my-token"}
        provider = {
            "npm": package,
            "name": "mine",
            "options": options,
            "models": {MODEL: {"name": MODEL}},
        }
        config = {"model": f"mine/{MODEL}", "autoupdate": False, "provider": {"mine": provider}}
        files = {".config/opencode/opencode.json": json.dumps(config)}
        return Start(["run"], ["run", "-c"], OFFLINE, files)

    return start


def _qwen_code_by(kind: str) -> Starting:
    """Qwen Code with the API of a kind, openai or anthropic."""

    def start(url: str) -> Start:
        prefix = kind.upper()
        variables = {
            f"{prefix}_BASE_URL": f"{url}/v1" if kind == "openai" else url,
            f"{prefix}_API_KEY": "my-token",
            f"{prefix}_MODEL": MODEL,
        }
        silent = json.dumps({"privacy": {"usageStatisticsEnabled": False}})
        flags = ["--auth-type", kind, "-y"]
        files = {".qwen/settings.json": silent}
        return Start([*flags, "-p"], [*flags, "-c", "-p"], variables, files)

    return start


def _pi_by(api: str) -> Starting:
    """pi with one of its APIs."""

    def start(url: str) -> Start:
        model: dict[str, Any] = {
            "id": MODEL,
            "name": MODEL,
            "reasoning": True,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": CONTEXT_TOKENS,
            "maxTokens": 8192,
        }
        base = url if api == "anthropic-messages" else f"{url}/v1"
        provider = {"baseUrl": base, "api": api, "apiKey": "my-token", "models": [model]}
        files = {".pi/agent/models.json": json.dumps({"providers": {"mine": provider}})}
        flags = ["--provider", "mine", "--model", MODEL]
        return Start([*flags, "-p"], [*flags, "-c", "-p"], OFFLINE, files)

    return start


def _copilot_by(variables: Mapping[str, str], suffix: str = "/v1") -> Starting:
    """Copilot CLI with one of its kinds of providers."""

    def start(url: str) -> Start:
        usual = {
            "COPILOT_OFFLINE": "true",
            "COPILOT_PROVIDER_BASE_URL": url + suffix,
            "COPILOT_PROVIDER_API_KEY": "my-token",
            "COPILOT_MODEL": MODEL,
            **variables,
            **OFFLINE,
        }
        flags = ["--allow-all"]
        return Start([*flags, "-p"], [*flags, "--continue", "-p"], usual, {})

    return start


def _cline(url: str) -> Start:
    named = ["-k", "my-token", "-m", MODEL, "-b", f"{url}/v1"]
    flags = ["--json", "-y"]
    return Start(flags, flags, OFFLINE, {}, ["auth", "-p", "openai", *named])


def _continue(url: str) -> Start:
    model = {
        "name": MODEL,
        "provider": "vllm",
        "model": MODEL,
        "apiBase": f"{url}/v1",
        "apiKey": "my-token",
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
    }
    config = {"name": "mine", "version": "0.0.1", "schema": "v1", "models": [model]}
    files = {".continue/config.yaml": json.dumps(config)}
    flags = ["--config", "../.continue/config.yaml", "--auto"]
    variables = {"CONTINUE_TELEMETRY_ENABLED": "0", **OFFLINE}
    return Start([*flags, "-p"], [*flags, "--resume", "-p"], variables, files)


def _grok(url: str) -> Start:
    flags = ["-u", f"{url}/v1", "-k", "my-token", "-m", MODEL, "-p"]
    return Start(flags, flags, OFFLINE, {})


def _kimi_code_by(kind: str) -> Starting:
    """Kimi Code with the API of a kind."""

    def start(url: str) -> Start:
        base = url if kind == "anthropic" else f"{url}/v1"
        config = f"""default_model = "mine"

[models.mine]
provider = "mine"
model = "{MODEL}"
max_context_size = {CONTEXT_TOKENS}
capabilities = ["thinking"]

[providers.mine]
type = "{kind}"
base_url = "{base}"
api_key = "my-token"
"""
        return Start(["-p"], ["-c", "-p"], OFFLINE, {".kimi-code/config.toml": config})

    return start


def _library_by(library: str, api: str) -> Starting:
    """A program of ours that gives a library of Python two tools and the texts."""

    def start(url: str) -> Start:
        words = [str(_PROGRAMS), library, api, url, MODEL]
        return Start(words, words, {"OTEL_SDK_DISABLED": "true", **OFFLINE}, {})

    return start


STARTS: Mapping[str, Starting] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode_by("@ai-sdk/openai-compatible"),
    "qwen-code": _qwen_code_by("openai"),
    "pi": _pi_by("openai-completions"),
    "copilot": _copilot_by({"COPILOT_PROVIDER_TYPE": "openai"}),
}

_RESPONSES = {"COPILOT_PROVIDER_TYPE": "openai", "COPILOT_PROVIDER_WIRE_API": "responses"}

OTHER_STARTS: Mapping[str, Client] = {
    "opencode by @ai-sdk/anthropic": Client("opencode", _opencode_by("@ai-sdk/anthropic")),
    "opencode by @ai-sdk/openai": Client("opencode", _opencode_by("@ai-sdk/openai")),
    "qwen-code --auth-type anthropic": Client("qwen-code", _qwen_code_by("anthropic")),
    "pi by anthropic-messages": Client("pi", _pi_by("anthropic-messages")),
    "pi by openai-responses": Client("pi", _pi_by("openai-responses")),
    "copilot by anthropic": Client(
        "copilot", _copilot_by({"COPILOT_PROVIDER_TYPE": "anthropic"}, suffix="")
    ),
    "copilot by responses": Client("copilot", _copilot_by(_RESPONSES)),
    "cline": Client("cline", _cline),
    "continue": Client("continue", _continue),
    "grok": Client("grok", _grok, goes_on=False),
    "kimi-code": Client("kimi-code", _kimi_code_by("openai")),
    "kimi-code by anthropic": Client("kimi-code", _kimi_code_by("anthropic")),
    "kimi-code by responses": Client("kimi-code", _kimi_code_by("openai_responses")),
    **{
        f"{library} by {api}": Client(library, _library_by(library, api), goes_on=False)
        for library, apis in {
            "openai-agents": ("chat", "responses"),
            "pydantic-ai": ("chat", "messages", "responses"),
            "langchain": ("chat", "messages", "responses"),
            "smolagents": ("chat",),
        }.items()
        for api in apis
    },
}
