import gc
import io
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from extproc.__main__ import main
from extproc.base.installed import installed_version
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.router_process import AS_FIRST_PROCESS, first_process, needs_namespaces
from tests.ports import free_port

KVSTEER = [sys.executable, "-m", "extproc"]


def config(directory: Path, **sections: object) -> str:
    ports = {
        name: {"listen": f"127.0.0.1:{free_port()}"} for name in ("extproc", "admin", "metrics")
    }
    models = [{"name": "tiny", "tokenizer": str(TINY_MODEL)}]
    # nobody listens there: an unreachable worker must not matter
    events = {"zmq": "tcp://127.0.0.1:9", "replay": "tcp://127.0.0.1:10"}
    workers = [{"endpoint": "127.0.0.1:9", "events": events}]
    file = directory / "kvsteer.yaml"
    file.write_text(yaml.safe_dump({**ports, "models": models, "workers": workers, **sections}))
    return str(file)


# A command where the index's core was not built.
WITHOUT = "import sys; sys.modules['kvstate._core'] = None; from extproc.__main__ import main; "


def run_without_core(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{WITHOUT}sys.exit(main())", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_without_the_core_names_the_ways_to_it(tmp_path: Path) -> None:
    done = run_without_core("serve", "--config", config(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvsteer: the compiled core kvstate._core is missing.")
    assert "`make demo`" in line
    assert "`docker compose up`" in line


def test_version_and_help_need_no_core() -> None:
    for arguments in (["--version"], ["--help"], ["serve", "--help"]):
        assert run_without_core(*arguments).returncode == 0


def test_main_freezes_loaded_objects_for_the_garbage_collector() -> None:
    """Only at the start of a process of its own; later calls keep nothing more."""
    shows = """
import gc, sys
from extproc.__main__ import main
from extproc.base.installed import installed_version
try:
    main(["worker", "--help"])
finally:
    print(gc.get_freeze_count(), gc.isenabled(), file=sys.stderr)
"""
    shown = subprocess.run(
        [sys.executable, "-c", shows], capture_output=True, text=True, check=True
    ).stderr.split()
    assert int(shown[0]) > 10_000
    assert shown[1] == "True"
    before = gc.get_freeze_count()
    with pytest.raises(SystemExit):
        main(["worker", "--help"])
    assert 0 < gc.get_freeze_count() <= before


def test_check_accepts_a_valid_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path)
    assert main(["check", "--config", file]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"


def test_check_notes_a_probable_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workers = [{"endpoint": "127.0.0.1:9", "lora": ["x"]}]
    file = config(tmp_path, workers=workers)
    assert main(["check", "--config", file]) == 0
    note = f"{file}: note: workers[0].lora: 'x' is not in any model's lora"
    assert capsys.readouterr().out == f"{note}\n{file}: ok\n"


def test_check_notes_what_is_open_or_not_keyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, models=[{"name": "m"}], extproc={"listen": "0.0.0.0:9002"})
    assert main(["check", "--config", file]) == 0
    shown = capsys.readouterr().out
    assert f"{file}: note: models[0].tokenizer: none: the tokens of m's prompts" in shown
    assert f"{file}: note: extproc.listen: 0.0.0.0:9002 is open without TLS" in shown


def test_check_reads_the_files_without_which_serve_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tls = {"certificate": "/nowhere/c.pem", "key": "/nowhere/k.pem"}
    sharing = {"url": "valkey://127.0.0.1:6379/0", "secret_file": "/nowhere/secret"}
    router_tls = {"ca": "/nowhere/ca.pem"}
    file = config(
        tmp_path,
        extproc={"tls": tls, "listen": f"127.0.0.1:{free_port()}"},
        envoy={"router_tls": router_tls},
        sharing=sharing,
        isolation={"header": "x-tenant", "secret_file": "/nowhere/salt"},
    )
    assert main(["check", "--config", file]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{file}: extproc.tls.certificate: /nowhere/c.pem: No such file")
    assert second.startswith(f"{file}: isolation.secret_file: /nowhere/salt")
    assert third.startswith(f"{file}: sharing.secret_file: /nowhere/secret")
    assert all(re.search(r" \(line \d+\)$", one) for one in (first, second, third))


def test_check_names_missing_files_beside_wrong_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(
        tmp_path,
        extproc={"tls": {"certificate": "/nowhere/c.pem", "key": "/nowhere/k.pem"}},
        isolation={"header": "x-tenant", "secret_file": 5},
        log={"level": "loud"},
    )
    assert main(["check", "--config", file]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in shown] == [
        "extproc.tls.certificate",
        "isolation.secret_file",
        "log.level",
    ]


def test_configuration_is_named_in_four_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVSTEER_CONFIG", raising=False)
    assert main(["check"]) == 2
    assert "there is no kvsteer.yaml here: name a file, or set KVSTEER_CONFIG" in (
        capsys.readouterr().err
    )
    file = config(tmp_path)
    assert [main(["check"]), main(["check", file]), main(["check", "--config", file])] == [0, 0, 0]
    (tmp_path / "other.yaml").write_text("{}")
    monkeypatch.setenv("KVSTEER_CONFIG", "other.yaml")
    assert main(["check"]) == 2
    assert main(["check", file, "--config", "other.yaml"]) == 2
    assert "two configurations are given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "\nConnect it:\n  check "),
        (["tops"], "kvsteer: there is no command 'tops'; did you mean top?"),
        (["xyzzy"], "kvsteer: there is no command 'xyzzy'; `kvsteer` lists the commands"),
    ],
)
def test_first_word_that_is_no_command_is_answered_with_commands(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    assert said in capsys.readouterr().err


def test_top_without_a_router_says_which_process_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["top", "--once", "--admin", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "Connection refused: no router runs there" in capsys.readouterr().err


def test_check_names_faults_line_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, log={"level": "loud"}, extproc={"deadline_ms": 0})
    assert main(["check", "--config", file]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in shown] == ["extproc.deadline_ms", "log.level"]
    assert all(line.startswith(f"{file}: ") for line in shown)


@pytest.mark.parametrize("command", ["serve", "envoy"])
def test_commands_refuse_a_configuration_with_faults(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", config(tmp_path, models=[])]) == 2
    assert "models: at least one is needed" in capsys.readouterr().err


def test_envoy_command_prints_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["envoy", "--config", config(tmp_path)]) == 0
    assert "override_host" in capsys.readouterr().out


@pytest.mark.parametrize("section", ["extproc", "admin", "metrics"])
def test_serve_names_a_taken_port_in_one_line(
    tmp_path: Path, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = config(tmp_path, **{section: {"listen": f"127.0.0.1:{port}"}})
        assert main(["serve", "--config", file]) == 1
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("kvsteer: ")]
    address = f"127.0.0.1:{port}"
    assert line == f"kvsteer: {section}.listen: cannot listen on {address}: Address already in use"


@pytest.mark.parametrize(("style", "is_json"), [("text", False), ("json", True)])
def test_serve_runs_and_explains_until_a_signal(
    tmp_path: Path,
    style: str,
    *,
    is_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = config(tmp_path, log={"format": style})
    admin = yaml.safe_load(Path(file).read_text())["admin"]["listen"]
    router = subprocess.Popen(
        [*KVSTEER, "serve", "--config", file], stderr=subprocess.PIPE, text=True
    )
    assert router.stderr is not None
    lines = iter(router.stderr.readline, "")
    started = next(line for line in lines if "serving ext_proc on" in line)
    assert started.startswith("{") == is_json
    messages = [{"role": "user", "content": "hello"}]
    request = json.dumps({"model": "tiny", "messages": messages}).encode()
    command = ["explain", "--admin", f"http://{admin}"]
    given(monkeypatch, request)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("It would go to 127.0.0.1:9: no worker holds any of the ")
    assert shown.splitlines()[3].endswith("  picked")
    given(monkeypatch, request)
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pick"] == ["127.0.0.1:9"]
    router.send_signal(signal.SIGHUP)
    router.send_signal(signal.SIGTERM)
    assert router.wait(60) == 0
    router.stderr.close()


@needs_namespaces
def test_serve_as_first_process_ends_by_a_signal_during_its_start(tmp_path: Path) -> None:
    config = tmp_path / "kvsteer.yaml"
    os.mkfifo(config)
    command = [*AS_FIRST_PROCESS, *KVSTEER, "serve", "--config", str(config)]
    with subprocess.Popen(command) as router, config.open("w"):  # waits until the router opens it
        os.kill(first_process(router.pid), signal.SIGTERM)
        assert router.wait(60) == 128 + signal.SIGTERM


@needs_namespaces
@pytest.mark.parametrize("refused", ["kvsteer.yaml", "model", "model/tokenizer.json"])
def test_unreadable_file_is_named_with_the_user(refused: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model)
    file = config(tmp_path, models=[{"name": "tiny", "tokenizer": str(model)}])
    (tmp_path / refused).chmod(0)
    without_rights = ("unshare", "--user")  # root may read everything
    command = [*without_rights, *KVSTEER, "check", "--config", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (tmp_path / refused).chmod(0o700)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.search(
        r"cannot be read: Permission denied; this process runs as user \d+( \(line \d+\))?$", line
    )


def test_help_groups_commands_by_purpose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for title, command in (("Try it, and prove the gain", "demo"), ("Connect it", "check")):
        assert f"\n{title}:\n  {command} " in shown
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "\nRun the router.\n" in capsys.readouterr().out


def test_completion_offers_every_command_with_its_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["completion", "bash"]) == 0
    shown = capsys.readouterr().out
    options = dict(re.findall(r"(?m)^_shtab_kvsteer_(\w+)_option_strings=\((.*)\)$", shown))
    assert {"serve", "doctor", "whatif", "bridge", "worker", "traffic", "top"} <= set(options)
    assert " --probe" in options["doctor"]
    assert "--member" not in options["serve"]  # an option only for our own parent process


def given(monkeypatch: pytest.MonkeyPatch, written: bytes) -> None:
    """Puts bytes on the standard input of commands that run in this process."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written), encoding="utf-8"))


def test_explain_without_a_router_names_the_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = f"http://127.0.0.1:{free_port()}"
    given(monkeypatch, b"{}")
    assert main(["explain", "--admin", admin]) == 1
    assert admin in capsys.readouterr().err


def test_explain_prompts_for_input_at_a_terminal() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "wb") as keyboard, os.fdopen(theirs) as terminal:
        keyboard.write(b"nothing\n\x04")
        keyboard.flush()
        explained = subprocess.run(
            [*KVSTEER, "explain"], stdin=terminal, capture_output=True, text=True, check=False
        )
    assert explained.returncode == 2
    assert explained.stderr.startswith("reads a request's body, as JSON, from standard inp")


@pytest.mark.parametrize(
    ("options", "text", "status", "words"),
    [
        ([], "{", 2, "not JSON"),
        ([], "[" * 100_000, 2, "not JSON"),
        ([], "\udcff", 2, "not JSON"),
        ([], "", 2, "it is empty; `docker exec` and `docker run` need -i"),
        (["--admin", "no url"], "{}", 1, "kvsteer: explain: http://no url/explain: "),
        (["--admin", "http://a:b"], "{}", 1, "kvsteer: explain: http://a:b/explain: "),
    ],
)
def test_explain_refuses_malformed_input_and_names_the_fault(
    options: list[str],
    text: str,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given(monkeypatch, text.encode(errors="surrogateescape"))
    assert (main(["explain", *options]), words in capsys.readouterr().err) == (status, True)


@pytest.mark.parametrize("is_long", [False, True])
def test_closed_standard_output_is_no_error(tmp_path: Path, *, is_long: bool) -> None:
    command = ["completion", "bash"] if is_long else ["check", "--config", config(tmp_path)]
    printing = subprocess.Popen(
        [*KVSTEER, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert printing.stdout is not None
    assert printing.stderr is not None
    printing.stdout.close()
    shown = printing.stderr.read()
    printing.stderr.close()
    assert (printing.wait(), shown) == (141, b"")


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"kvsteer {installed_version()}\n"
