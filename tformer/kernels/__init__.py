"""C kernels for decoding on a CPU, where PyTorch has no fast operator; compiled on first use.

    library.py     finds a compiler, builds once per machine, checks and loads
    functions.py   the kernels as functions of tensors
    *.c            products of few rows, attention of few queries, the largest numbers of a row

Without a compiler `functions.find` returns None, and callers use PyTorch's operators.
"""
