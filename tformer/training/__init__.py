"""Training: precision, processes, the loop, what is saved, and what is shown meanwhile."""
