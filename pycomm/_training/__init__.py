"""Private: what `compress`, `optim` and `parallel` share."""
