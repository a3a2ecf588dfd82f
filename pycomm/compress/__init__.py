"""Compressed training with torch: deep gradient compression, compression of updates, and quantized
gradients.
"""
