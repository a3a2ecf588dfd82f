"""Data-parallel training with torch: gradients are averaged over all ranks."""
