"""The parts of a Transformer: modules that take plain values and know nothing of recipes, tokenizers or files.

linear, fused            matrix products, elementwise maths with hand-written gradients
norm, feedforward        what a block is made of, beside attention
positions/, attention/   one file each and a table; masks and cache belong to attention
embedding, block, stack  from tokens or patches to hidden states
heads, losses            from hidden states to predictions, and to cross-entropy without logits
init, taps               every initial value; every inner tensor by name
"""
