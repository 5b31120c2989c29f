"""Block-sparse attention: patterns of visible keys, fused kernels, and explicit scores for biases and dropout."""
