"""What couples the samples of a batch: found, told, and declared to mean something when the batch is cut."""
