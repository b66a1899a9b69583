"""Mixtures of experts: routers, routed experts, and the layer that contains them."""
