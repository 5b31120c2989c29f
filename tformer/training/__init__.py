"""Training: options, preparation, the loop, run state, distillation, terminal output."""
