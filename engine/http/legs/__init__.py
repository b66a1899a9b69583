"""HTTP hooks for the legs of disaggregated requests. Every server serves both legs."""
