"""A simulation of servers: engines that run steps, devices, and KV stores."""
