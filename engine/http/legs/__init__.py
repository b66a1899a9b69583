"""HTTP hooks for each leg of a disaggregated request. Every server takes either leg."""
