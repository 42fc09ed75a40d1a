"""`voltserve smoke`: the whole path, first with a small model and then with the user's, in one report.

`checks` asks a running service and judges its answers, `run` goes through the steps, `report` shows them.
"""
