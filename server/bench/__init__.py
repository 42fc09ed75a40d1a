"""`voltserve bench`: puts load on a running OpenAI-compatible server, and measures it as its users see it.

`load` sets when requests arrive, `prompts` their text; `client` sends one, `run` all of them. `measures` are pure
functions of the outcomes; `report` and `page` show them. Nothing is shared with the gateway that may be measured.
"""
