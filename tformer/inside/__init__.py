"""Analyses of a loaded model: pure functions that read and replace its taps; `viz` draws their results.

heads                 scores of attention heads: previous token, first token, duplicate, induction, alignment
patching              activation patching between two inputs, its estimate by gradients, ablation of heads and layers
attribution           gradient x input, integrated gradients, occlusion: which token mattered for an answer
lens                  logit lens: the answer after each layer
logits                direct logit attribution: what each head and each feed-forward adds to a logit
tuned                 tuned lens: an affine map for each layer before the answer
tokens                loss, rank and alternatives of each token; calibration; common segments of two runs
embeddings            nearest neighbours and principal components of vectors of tokens and labels
answers               tokens and labels by name
reading               one text or image as model inputs with the tokens along each axis; the positions that answer
options               options of the commands, which are also keywords in Python
"""
