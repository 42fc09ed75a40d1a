"""`voltserve sweep`: the engine restarted with one combination of settings after another, each under the same load.

`grid` has the points, `store` remembers what came of each, `run` does the work, `choose` picks, `page` shows.
"""
