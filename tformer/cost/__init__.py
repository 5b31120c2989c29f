"""Cost of a model: floating-point operations (`flops`), and memory of training and decoding (`memory`)."""
