"""Pruning (LayerDrop, arXiv 1909.11556; heads, arXiv 1905.10650): a smaller model out of a trained one."""
