"""`voltserve monitor`: what a service and the GPUs under it are doing, live in a terminal.

`reading` asks the service and the driver, `figures` makes rates of two readings, `view` draws them.
"""
