"""Private: helpers that `compress`, `optim` and `parallel` share."""
