"""Kernels in C for what decoding does and PyTorch has no quick operator for, compiled on first use where possible.

    library.py     finds a compiler, builds once per machine, loads, checks
    functions.py   the kernels as functions of tensors
    *.c            products of few rows, attention of few queries, the largest numbers of a row

Nothing depends on them: whoever calls asks `library.available()` first and has PyTorch's operators otherwise.
"""
