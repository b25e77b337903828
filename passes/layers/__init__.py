"""Layers: found in the joint graph, planned, rewritten."""
