"""Who writes candidates: a search over templates, a model behind an endpoint, a coding agent's command."""
