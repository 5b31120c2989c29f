"""What a model computes: pure functions on a loaded model that read and replace its taps; `viz` draws their results.

heads                 scores of attention heads: previous token, first token, duplicate, induction, alignment
patching              activation patching between two inputs, its estimate by gradients, ablation of heads and layers
options               options of the commands, which are also keywords in Python
"""
