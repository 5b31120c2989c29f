"""What a model costs: floating-point operations (`flops`), and memory of training and decoding (`memory`)."""
