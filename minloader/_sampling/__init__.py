"""What a batch is made of: samplers and collate functions."""
