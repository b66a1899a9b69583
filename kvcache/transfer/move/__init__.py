"""Moving block copies: by torch, by a kernel, by copy engines; out of peers' memory or staging."""
