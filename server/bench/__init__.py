"""`voltserve bench`: load on a running OpenAI-compatible server, and what its users get of it.

`load` says how requests arrive, `prompts` what they hold, `client` sends one, `run` all of them; `measures` are pure
functions of what came back; `report` and `page` show them. Nothing is shared with the gateway that may be measured.
"""
