"""Observing: gradients of a step as it ran beside exact ones, and what follows from them."""
