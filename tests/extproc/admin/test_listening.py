import pytest

from extproc.address import Address
from extproc.admin.application import listen, metrics_application
from extproc.errors import StartError
from extproc.observing.metrics import Metrics
from tests.extproc.admin.serving import Served


async def test_a_taken_port_is_told_in_one_line(served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    application = metrics_application(Metrics(), lambda: "")
    with pytest.raises(StartError, match=rf"metrics\.listen: cannot listen on 127\.0\.0\.1:{port}"):
        await listen(application, Address("127.0.0.1", port), "metrics")
