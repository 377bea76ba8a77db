"""From captured shards to packed batches: formats, index, packing, plan, datamodule."""
