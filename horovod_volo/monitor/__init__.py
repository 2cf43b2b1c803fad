"""Logs and metrics of a run: terminal, log.txt, metrics.jsonl and TensorBoard. Only rank 0 writes."""
