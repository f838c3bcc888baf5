"""`kvsteer doctor`: asks everything that a configuration names, and says what is wrong with it.

It is another reader beside a router that runs: a second subscriber, a second replay, some questions
over HTTP. A queue that is drained is left alone, and nothing is sent to a model, unless that is
asked for (`--probe`).
"""
