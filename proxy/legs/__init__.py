"""Parts of the legs of a request: their calls, charges, sizes and metric series."""
