"""Several machines: replicas on Ray Serve behind the same gateway. Only `on_ray` imports Ray, and nothing imports that:
its modules are processes of their own.
"""
