"""`voltserve sweep`: the engine restarted with one combination of settings after another, each under the same load.

`grid` has the points, `store` keeps their results, `run` measures, `choose` selects, `page` shows.
"""
