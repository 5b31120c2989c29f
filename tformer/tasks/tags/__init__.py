"""Sentences of words with tags."""
