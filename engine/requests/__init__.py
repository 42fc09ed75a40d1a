"""One request's inputs fail that request and nothing else.

`admission` and `grammar` check what the engine process cannot survive, before a request reaches it; `checker` compiles
unknown grammars where a crash harms nobody; `client` is vLLM's client with these checks. In the engine process `rows`
marks a row that no token can be drawn from, and `scheduling` fails its request. docs/requests.md lists every field.
"""
