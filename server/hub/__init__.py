"""Models on hubs: fetched whole, looked at before they are fetched, and advised about."""
