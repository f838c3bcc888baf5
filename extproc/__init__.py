"""What to do with a request: parse, tokenize, pick a worker, and tell Envoy."""

from extproc.running import request_path

request_path.take(request_path.CHOICE)
