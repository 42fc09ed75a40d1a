"""Short programs that try GPUs out, for `voltserve doctor`. Each prints one JSON object as its last line.

They run in processes of their own, because they load torch, and because what they try may hang.
"""
