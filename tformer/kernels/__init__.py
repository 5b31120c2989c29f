"""C kernels for decoding on a CPU, where PyTorch has no fast operator; compiled on first use.

    library.py     finds a compiler, builds once per machine, checks and loads
    functions.py   the kernels as functions of tensors
    tape.py        the kernel calls of one decoding step, recorded, and repeated by one call: tape.c
    linear.c       products with weights in bf16, fp32, 8 and 4 bits; around.c: the norm before, bias, activation, gate
                   and residual after; rounding.c: to 8 and 4 bits
    tiles.h        how rows of x lie for each format, and their products: tiles_float.c, tiles_integer.c, panels.c
    attention.c    attention of few queries
    top.c          the largest numbers of a row

The same source serves AVX512, AVX2 and other processors: vectors.h holds what depends on the width of a vector.

Without a compiler `functions.find` returns None, and callers use PyTorch's operators.
"""
