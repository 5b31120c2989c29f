"""Attention: its weights, their summaries, and the page and pictures of them."""
