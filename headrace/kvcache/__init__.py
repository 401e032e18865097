"""Which block of the KV cache holds what; numbers only, never tensors."""
