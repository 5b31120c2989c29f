"""Token ids: the shards and cache of running text, and labelled rows and pairs in memory."""
