"""Batching: windows, mixtures and pairs of sentences as samples; the plan of batches; padding."""
