"""`kvsteer whatif` where nothing can be written, as in the containers of docker-compose.yml."""

import json
import shutil
import subprocess
import sys

import pytest

NO_NAMESPACE = 99

# Nothing can be written where temporary files are looked for.
READ_ONLY = f"""
for folder in /tmp /var/tmp; do
  mount --bind $folder $folder && mount -o remount,bind,ro $folder || exit {NO_NAMESPACE}
done
cd /proc
"$@" -c "import tempfile; tempfile.gettempdir()" 2>/dev/null && exit {NO_NAMESPACE}
exec "$@" -m extproc whatif - --workers 2 --seeds 1
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_whatif_needs_no_temporary_directory() -> None:
    lines = [
        {"timestamp": at, "input_length": 64, "hash_ids": [1], "block_size": 64} for at in (0, 9)
    ]
    given = "\n".join(map(json.dumps, lines))
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh", sys.executable]
    run = subprocess.run(command, input=given, capture_output=True, check=False, text=True)
    if run.returncode == NO_NAMESPACE or run.stderr.startswith("unshare:"):
        pytest.skip("needs a mount namespace in which nothing can be written")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("2 requests")
