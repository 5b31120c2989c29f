"""From files to batches: sources (documents, rows, images) -> shards (token ids) -> batching (windows, plan)."""
