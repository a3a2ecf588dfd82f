"""Training steps, convergence, and the bytes that training receives."""
