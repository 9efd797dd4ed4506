"""Families with latent attention (MLA), after DeepSeek."""
