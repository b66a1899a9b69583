"""Task files for lm_eval, and what they call."""
