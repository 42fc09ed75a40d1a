"""What clients send and are told: one request's inputs fail that request and nothing else, with an error that says why.

Before a request enters the batch, `admission` and `grammar` check what the engine process cannot survive; `checker`
compiles unknown grammars where a crash harms nobody; `client` is vLLM's client with these checks. In the engine process
`rows` marks a row that no token can be drawn from, and `scheduling` fails its request. `routes` stands before vLLM's
handlers and corrects their answers; `errors` has the one shape of errors. docs/requests.md lists every field.
"""
