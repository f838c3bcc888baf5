import pytest

from extproc.base.errors import ConfigError
from extproc.config.reader import parse

CONFIG = "models: [{{name: m}}]\nworkers: [{{endpoint: '127.0.0.1:1'}}]\nadmin: {{hosts: ['{}']}}\n"


@pytest.mark.parametrize("host", ["kvsteer.llm.svc", "10.0.0.5", "fd00::1", "a"])
def test_admin_hosts_are_names_and_addresses(host: str) -> None:
    assert parse(CONFIG.format(host), "c").admin.hosts == (host,)


@pytest.mark.parametrize("host", ["a:80", "http://a", "*", "", "a b", "[fd00::1]"])
def test_admin_hosts_refuse_ports_and_patterns(host: str) -> None:
    with pytest.raises(ConfigError, match=r"admin.hosts\[0\]"):
        parse(CONFIG.format(host), "c")
