"""`kvsteer doctor`: checks everything that a configuration names, and reports what is wrong.

It may run beside a router: it is a second subscriber, asks for a second replay, and sends some
requests over HTTP. Only with `--probe` does it drain a queue or send a request to a model.
"""
