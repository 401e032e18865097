"""Models: configurations, weights and decoders, ours and Transformers'."""
