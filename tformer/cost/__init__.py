"""Cost of a model: operations (`flops`), memory (`memory`), time (`duration`), one of several devices (`parallel`)."""
