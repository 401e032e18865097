"""Text to tokens and back: tokenizers, chat templates, detokenizing, stop strings. No HTTP, no torch."""
