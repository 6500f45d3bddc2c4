"""What stands in for CUDA and Transformer Engine on machines without them."""
