"""Import from and export to Hugging Face: equal logits, or an error that names the unsupported feature."""
