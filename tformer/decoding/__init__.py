"""Text generation: sampling, beam search, stop rules and the decoding engine with its cache."""
