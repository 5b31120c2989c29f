"""Modules of a Transformer. They take plain values and import torch and each other only.

linear, products         matrix products; prepared for inference
norm, feedforward        parts of a block, beside attention
positions/, attention/   a file per kind or family of kinds, and a table
embedding, patches       from tokens or images to vectors
stack                    from vectors to hidden states
heads, losses            from hidden states to predictions, and to cross-entropy in chunks
init                     initialization of all weights
"""
