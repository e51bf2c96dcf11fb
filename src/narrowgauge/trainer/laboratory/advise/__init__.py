"""Which line trains this model best on this machine? A search over plans and forecasts."""
