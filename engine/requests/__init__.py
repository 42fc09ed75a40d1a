"""Clients' requests and their answers: an invalid request fails alone, with an error that says why.

- `routes` runs before vLLM's handlers and corrects their answers. `errors` has the one form of all errors.
- `admission` and `grammar` refuse requests that the engine process would not survive, before they enter the batch.
- `checker` compiles unknown grammars in a process whose crash harms no other request.
- `client` is vLLM's client with these checks.
- In the engine process, `rows` marks a row without a possible token, and `scheduling` fails its request.

docs/requests.md lists every field.
"""
