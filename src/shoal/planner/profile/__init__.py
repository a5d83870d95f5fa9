"""Model profiler: traces a model without weights, operator by operator, into a `Profile`."""
