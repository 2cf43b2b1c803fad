"""What people look at: the terminal, log.txt, metrics.jsonl and TensorBoard. Only rank 0 writes."""
