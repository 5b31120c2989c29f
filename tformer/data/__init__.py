"""From files to batches: sources, token shards, windows, batch plans.

sources -> chunks -> tokenise -> cache (shards) -> corpus -> windows (or mixture) -> plan -> prefetch -> batch
"""
