"""Command lines and output, unauthenticated clients, and leak checks; tests use them too."""
