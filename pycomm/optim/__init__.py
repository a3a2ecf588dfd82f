"""Optimizers that communicate rarely, and a static loss scale; with torch."""
