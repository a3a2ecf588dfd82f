"""Fault injection, rank failures, unauthenticated clients, cancellation, soak, cost of checks."""
