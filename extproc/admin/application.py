"""The admin server: everything that an operator may ask, and the live page."""

from aiohttp import web

from extproc.admin.decision_routes import decision_routes
from extproc.admin.fleet_routes import fleet_routes
from extproc.admin.json_errors import errors_as_json
from extproc.admin.map_routes import map_routes
from extproc.admin.observed import Observed
from extproc.admin.page_routes import page_routes
from extproc.admin.same_host import same_host_only
from extproc.router import Router
from extproc.workers.workers import Workers


def admin_application(
    router: Router,
    workers: Workers,
    observed: Observed,
    max_body_bytes: int,
    host: str,
    policy_header: str | None = None,
) -> web.Application:
    """All that docs/admin.md lists, but for where workers come from.

    host: where it listens, which requests may name besides loopback. policy_header: of requests
    that are explained.
    """
    # /explain wraps the body in an envelope, whose text escapes it once more at the worst
    application = web.Application(
        client_max_size=2 * max_body_bytes,
        middlewares=[errors_as_json(), same_host_only(host)],
    )
    application.add_routes(page_routes(workers))
    application.add_routes(fleet_routes(router, workers, policy_header and policy_header.lower()))
    application.add_routes(decision_routes(observed, workers))
    application.add_routes(map_routes(observed, workers))
    return application
