"""What to do with a request: parse, tokenize, pick a worker, and tell Envoy."""

import os

if os.path.exists(os.path.join(__path__[0], "compiled", "manifest.json")):  # noqa: PTH110, PTH118 - pathlib takes longer to import than this module
    from extproc.running import request_path

    request_path.take(request_path.CHOICE)
