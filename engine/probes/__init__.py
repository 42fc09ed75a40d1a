"""Short programs that test GPUs, for `voltserve doctor`. Each prints one JSON object as its last line.

They run in processes of their own, because they load torch and because the operation under test may hang.
"""
