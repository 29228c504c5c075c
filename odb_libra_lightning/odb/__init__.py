"""Online dynamic batching: token-budgeted batches formed after the data workers."""
