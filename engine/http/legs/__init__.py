"""HTTP hooks for the two legs of a disaggregated request. Every server serves both."""
