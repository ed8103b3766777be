"""Parts of `remanent.kv`: the index and the store of a block cache."""
